#include "meta.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/xattr.h>

#define PREFIX "user.e2b."

enum { PREFIX_LEN = sizeof PREFIX - 1, LIST_MAX = 65536, NAME_LEN_MAX = 255 };

/* The kernel's own limits; too large for a stack, and only touched where a file has attributes. */
static char names[LIST_MAX];
static char value[LIST_MAX];

static bool is_ours(const char *name) { return !strncmp(name, PREFIX, PREFIX_LEN) && name[PREFIX_LEN]; }

int meta_check(struct reader *r)
{
	uint32_t count = get_u32(r);
	size_t total = 0;

	if (count % 2)
		return EINVAL;
	for (uint32_t i = 0; i < count && !r->bad; i += 2) {
		size_t name = PREFIX_LEN + strlen(get_text(r));

		total += name + strlen(get_text(r));
		if (name == PREFIX_LEN)
			return EINVAL;
		if (name > NAME_LEN_MAX || total > META_MAX)
			return E2BIG;
	}
	return r->bad ? EINVAL : 0;
}

static bool is_wanted(struct reader r, const char *key)
{
	uint32_t count = get_u32(&r);

	for (uint32_t i = 0; i < count && !r.bad; i += 2) {
		bool same = !strcmp(get_text(&r), key);

		get_text(&r);
		if (same)
			return true;
	}
	return false;
}

static int drop_others(int fd, struct reader wanted)
{
	ssize_t len = flistxattr(fd, names, sizeof names);

	if (len < 0)
		return errno == ENOTSUP ? 0 : errno;
	for (const char *name = names; name < names + len; name += strlen(name) + 1)
		if (is_ours(name) && !is_wanted(wanted, name + PREFIX_LEN) && fremovexattr(fd, name) < 0 && errno != ENODATA)
			return errno;
	return 0;
}

int meta_replace(int fd, struct reader r)
{
	char name[NAME_LEN_MAX + 1] = PREFIX;
	uint32_t count;
	int rc = drop_others(fd, r);

	if (rc || r.p == r.end)
		return rc;
	count = get_u32(&r);
	for (uint32_t i = 0; i < count; i += 2) {
		const char *key = get_text(&r), *text = get_text(&r);

		strcpy(name + PREFIX_LEN, key);
		if (fsetxattr(fd, name, text, strlen(text), 0) < 0)
			return errno;
	}
	return 0;
}

bool meta_put(struct writer *w, const char *path)
{
	ssize_t len = listxattr(path, names, sizeof names), size;
	struct writer head = *w;
	uint32_t count = 0;
	size_t left = META_SHOWN_MAX;

	put_u32(w, 0); /* the count, when it is known */
	for (const char *name = names; len > 0 && name < names + len; name += strlen(name) + 1) {
		if (!is_ours(name) || (size = getxattr(path, name, value, META_MAX)) < 0)
			continue; /* gone meanwhile, or no value of ours */
		if (strlen(name) + (size_t)size + 8 > left)
			break;
		left -= strlen(name) + (size_t)size + 8;
		put_text(w, name + PREFIX_LEN);
		put_u32(w, (uint32_t)size);
		put_bytes(w, value, (size_t)size);
		count += 2;
	}
	if (count)
		put_u32(&head, count);
	else
		*w = head;
	return count > 0;
}

int meta_copy(int from, int to)
{
	ssize_t len = flistxattr(from, names, sizeof names), size;

	for (const char *name = names; len > 0 && name < names + len; name += strlen(name) + 1) {
		if (strncmp(name, "user.", 5))
			continue;
		size = fgetxattr(from, name, value, sizeof value);
		if (size >= 0 && fsetxattr(to, name, value, (size_t)size, 0) < 0)
			return errno == ENOTSUP ? 0 : errno;
	}
	return 0;
}
