/* Listing and removing trees. copy.c has the third. */
#include "walk.h"

#include "info.h"
#include "meta.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ENTRIES_MAX = 100000, HELD_MAX = 48 };

/* --- list --- */

struct names {
	char **at;
	size_t count, cap;
};

/* One listing. The path grows and shrinks with the level, so that levels are cheap on the stack. */
static struct {
	struct sink *sink;
	size_t left, len;
	char path[PATH_MAX];
	uint8_t record[2 * PATH_MAX + 4096 + META_SHOWN_MAX];
} ls;

static int by_bytes(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static bool is_dots(const char *name) { return name[0] == '.' && (!name[1] || (name[1] == '.' && !name[2])); }

static int add_name(struct names *names, const char *name)
{
	if (!ls.left)
		return E2BIG;
	if (names->count == names->cap) {
		size_t cap = names->cap ? 2 * names->cap : 64;
		char **grown = realloc(names->at, cap * sizeof *grown);

		if (!grown)
			return ENOMEM;
		names->at = grown;
		names->cap = cap;
	}
	names->at[names->count] = strdup(name);
	if (!names->at[names->count])
		return ENOMEM;
	names->count++;
	ls.left--;
	return 0;
}

static int read_names(int fd, struct names *names)
{
	int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3), rc = 0;
	DIR *dir = copy < 0 ? NULL : fdopendir(copy);
	struct dirent *entry;

	if (!dir) {
		rc = errno;
		if (copy >= 0)
			close(copy);
		return rc;
	}
	while (!rc && (errno = 0, entry = readdir(dir)))
		rc = is_dots(entry->d_name) ? 0 : add_name(names, entry->d_name);
	rc = rc ? rc : errno;
	closedir(dir);
	if (!rc && names->count)
		qsort(names->at, names->count, sizeof *names->at, by_bytes);
	return rc;
}

static int list_level(int fd, uint32_t depth);

static int list_entry(int dir, const char *name, uint32_t depth)
{
	struct writer w = {.start = ls.record, .p = ls.record, .end = ls.record + sizeof ls.record};
	size_t len = ls.len;
	int n = snprintf(ls.path + len, sizeof ls.path - len, "/%s", name), rc, fd;

	if (n >= (int)(sizeof ls.path - len)) {
		ls.path[len] = 0;
		return 0; /* no call could name it */
	}
	ls.len += (size_t)n;
	rc = info_put(&w, dir, name, ls.path);
	if (!rc)
		rc = sink_write(ls.sink, ls.record, (size_t)(w.p - w.start));
	else if (rc == ENOENT)
		rc = 0, depth = 0; /* it vanished */
	fd = rc || depth <= 1 ? -1 : openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
	if (fd >= 0)
		rc = list_level(fd, depth - 1);
	else if (!rc && depth > 1 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM))
		rc = errno;
	ls.len = len;
	ls.path[len] = 0;
	return rc;
}

static int list_level(int fd, uint32_t depth)
{
	struct names names = {0};
	int rc = read_names(fd, &names);

	for (size_t i = 0; i < names.count; i++) {
		rc = rc ? rc : list_entry(fd, names.at[i], depth);
		free(names.at[i]);
	}
	free(names.at);
	close(fd);
	return rc;
}

int walk_list(const void *request, struct sink *sink)
{
	const struct list_request *r = request;
	int fd = open(r->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK);

	if (fd < 0)
		return errno;
	ls.sink = sink;
	ls.left = ENTRIES_MAX;
	ls.len = strlen(r->path);
	memcpy(ls.path, r->path, ls.len + 1);
	while (ls.len && ls.path[ls.len - 1] == '/')
		ls.path[--ls.len] = 0;
	return list_level(fd, r->depth);
}

/* --- remove --- */

/* Removes depth first with a bounded number of open directories: what lies deeper is first moved
 * up into the root of the removal under a name of its own. */
struct remover {
	int root;
	unsigned moved;
};

static int remove_entries(struct remover *rm, int dir, int level);

static int remove_entry(struct remover *rm, int dir, const char *name, int level)
{
	char aside[64];
	int fd, rc;

	if (unlinkat(dir, name, 0) == 0 || errno == ENOENT)
		return 0;
	if (errno != EISDIR && errno != EPERM && errno != EBUSY)
		return errno;
	rc = errno;
	if (unlinkat(dir, name, AT_REMOVEDIR) == 0 || errno == ENOENT)
		return 0;
	if (errno == ENOTDIR)
		return rc;
	if (errno != ENOTEMPTY && errno != EEXIST)
		return errno;
	if (level >= HELD_MAX) {
		snprintf(aside, sizeof aside, ".removing-%d-%u", (int)getpid(), rm->moved++);
		return renameat(dir, name, rm->root, aside) < 0 ? errno : 0;
	}
	fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return errno == ENOENT ? 0 : errno;
	rc = remove_entries(rm, fd, level + 1);
	if (!rc && unlinkat(dir, name, AT_REMOVEDIR) < 0 && errno != ENOENT)
		rc = errno;
	return rc;
}

/* One pass over DIR; takes over the descriptor. */
static int remove_pass(struct remover *rm, int fd, int level, bool *any)
{
	DIR *dir = fdopendir(fd);
	struct dirent *entry;
	int rc = 0;

	if (!dir) {
		rc = errno;
		close(fd);
		return rc;
	}
	*any = false;
	while (!rc && (errno = 0, entry = readdir(dir)))
		if (!is_dots(entry->d_name)) {
			*any = true;
			rc = remove_entry(rm, dirfd(dir), entry->d_name, level);
		}
	rc = rc ? rc : errno;
	closedir(dir);
	return rc;
}

static int remove_entries(struct remover *rm, int dir, int level)
{
	bool any = true;
	int rc = 0;

	/* What was moved up may lie where the pass had been already: the root is passed until one finds nothing. */
	while (!rc && any) {
		int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

		rc = fd < 0 ? errno : remove_pass(rm, fd, level, &any);
		any = any && level == 0;
	}
	close(dir);
	return rc;
}

int remove_tree(int dir, const char *name)
{
	struct remover rm = {0};
	int rc;

	for (int tries = 0;; tries++) {
		if (unlinkat(dir, name, 0) == 0 || errno == ENOENT)
			return 0;
		if (errno != EISDIR && errno != EPERM && errno != EBUSY)
			return errno;
		rc = errno;
		rm.root = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (rm.root < 0)
			return errno == ENOTDIR || errno == ELOOP ? rc : errno == ENOENT ? 0 : errno;
		rc = remove_entries(&rm, rm.root, 0);
		if (rc)
			return rc;
		if (unlinkat(dir, name, AT_REMOVEDIR) == 0 || errno == ENOENT)
			return 0;
		if ((errno != ENOTEMPTY && errno != EEXIST) || tries == 8)
			return errno;
	}
}

int walk_remove(const void *request, struct sink *sink)
{
	struct place place;
	int rc = path_place(request, NULL, &place);

	(void)sink;
	if (rc)
		return rc == ENOENT ? 0 : rc;
	rc = is_dots(place.name) ? EINVAL : remove_tree(place.dir, place.name);
	close(place.dir);
	return rc;
}
