#include "info.h"

#include "meta.h"
#include "proto.h"
#include "users.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

enum { NAMES = 8 };

/* Remembers the last few names within one operation: a listing asks for the same owners again and again. */
struct names {
	struct {
		uint32_t id;
		bool used;
		char text[256];
	} at[NAMES];
	int next;
};

static struct names users, groups;
static struct stat users_state, groups_state;

static void forget_if_changed(struct names *names, struct stat *state, const char *file)
{
	struct stat now;

	if (stat(file, &now) < 0)
		memset(&now, 0, sizeof now);
	if (now.st_ino != state->st_ino || now.st_size != state->st_size ||
	    now.st_ctim.tv_sec != state->st_ctim.tv_sec || now.st_ctim.tv_nsec != state->st_ctim.tv_nsec)
		memset(names, 0, sizeof *names);
	*state = now;
}

static const char *name_of(struct names *names, uint32_t id, void (*look_up)(uint32_t, char *, size_t))
{
	for (int i = 0; i < NAMES; i++)
		if (names->at[i].used && names->at[i].id == id)
			return names->at[i].text;
	names->next = (names->next + 1) % NAMES;
	look_up(id, names->at[names->next].text, sizeof names->at[0].text);
	names->at[names->next].id = id;
	names->at[names->next].used = true;
	return names->at[names->next].text;
}

static uint8_t type_of(mode_t mode)
{
	return S_ISREG(mode) ? T_FILE : S_ISDIR(mode) ? T_DIRECTORY : S_ISLNK(mode) ? T_SYMLINK : T_OTHER;
}

static void put_link(struct writer *w, int dirfd, const char *name)
{
	char target[PATH_MAX];
	ssize_t n = readlinkat(dirfd, name, target, sizeof target - 1);
	struct stat st;
	bool resolves = fstatat(dirfd, name, &st, 0) == 0;

	target[n < 0 ? 0 : n] = 0;
	put_u8(w, resolves ? LINK_RESOLVES : LINK_DANGLING);
	put_text(w, target);
	if (resolves) {
		put_u8(w, type_of(st.st_mode));
		put_u32(w, st.st_mode & 07777);
	}
}

int info_put(struct writer *w, int dirfd, const char *name, const char *path)
{
	struct stat st;
	const char *slash = strrchr(path, '/');
	uint8_t *more;

	if (fstatat(dirfd, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return errno;
	forget_if_changed(&users, &users_state, "/etc/passwd");
	forget_if_changed(&groups, &groups_state, "/etc/group");
	put_text(w, slash && slash[1] ? slash + 1 : path);
	put_text(w, path);
	put_u8(w, type_of(st.st_mode));
	put_u64(w, (uint64_t)st.st_size);
	put_u32(w, st.st_mode & 07777);
	put_u32(w, st.st_uid);
	put_u32(w, st.st_gid);
	put_text(w, name_of(&users, st.st_uid, user_name));
	put_text(w, name_of(&groups, st.st_gid, group_name));
	put_u64(w, (uint64_t)st.st_mtim.tv_sec * 1000000000ULL + (uint64_t)st.st_mtim.tv_nsec);
	more = w->p;
	if (S_ISLNK(st.st_mode))
		put_link(w, dirfd, name);
	else
		put_u8(w, 0);
	if (type_of(st.st_mode) != T_OTHER && !w->full && meta_put(w, path))
		*more |= HAS_META;
	return w->full ? EOVERFLOW : 0;
}
