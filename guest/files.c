/* The operations on names: stat, list, mkdir, move, remove. */
#include "info.h"
#include "ops.h"
#include "path.h"
#include "users.h"
#include "walk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool bad_request(uint32_t id, const struct reader *r)
{
	if (r->bad)
		result_error(id, C_INVALID, EINVAL, "request");
	return r->bad;
}

static bool bad_path(uint32_t id, const struct reader *r, const char *path)
{
	int rc = path_check(path);

	if (bad_request(id, r))
		return true;
	if (rc)
		result_errno(id, rc, "path");
	return rc != 0;
}

static bool no_owner(uint32_t id, const char *name, struct owner *owner)
{
	struct user user;

	if (user_find(name, &user) < 0) {
		result_error(id, C_NO_USER, 0, "user");
		return true;
	}
	*owner = (struct owner){user.uid, user.gid};
	return false;
}

void op_stat(uint32_t id, struct reader *r)
{
	const char *path = get_text(r);
	char clean[PATH_MAX];
	size_t len;
	struct writer w;
	int rc;

	if (bad_path(id, r, path))
		return;
	len = strlen(path);
	memcpy(clean, path, len + 1);
	while (len > 1 && clean[len - 1] == '/')
		clean[--len] = 0;
	w = result_begin();
	rc = info_put(&w, AT_FDCWD, clean, clean);
	if (rc)
		result_errno(id, rc, "stat");
	else
		result_end(&w, FLAG_FIN, id);
}

void op_list(uint32_t id, struct reader *r)
{
	struct list_request request = {.path = get_text(r)};
	struct stat st;

	request.depth = get_u32(r);
	if (bad_path(id, r, request.path))
		return;
	if (stat(request.path, &st) < 0)
		result_errno(id, errno, "list");
	else if (!S_ISDIR(st.st_mode))
		result_errno(id, ENOTDIR, "list");
	else
		helper_start(id, walk_list, &request, true, "list");
}

static int make_dir(const struct place *place, const struct owner *owner, mode_t mode)
{
	struct stat st;
	int fd, rc;

	if (mkdirat(place->dir, place->name, 0700) < 0)
		return errno;
	fd = openat(place->dir, place->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return errno;
	rc = fstat(fd, &st) < 0 || fchown(fd, owner->uid, owner->gid) < 0 || fchmod(fd, mode & 07777) < 0 ? errno : 0;
	close(fd);
	return rc;
}

void op_mkdir(uint32_t id, struct reader *r)
{
	const char *path = get_text(r), *user = get_text(r);
	mode_t mode = (mode_t)get_u32(r);
	struct owner owner;
	struct place place;
	int rc;

	if (bad_path(id, r, path) || no_owner(id, user, &owner))
		return;
	rc = path_place(path, &owner, &place);
	if (!rc) {
		rc = make_dir(&place, &owner, mode);
		close(place.dir);
	}
	if (rc)
		result_errno(id, rc, "mkdir");
	else
		result_ok(id, FLAG_FIN);
}

static bool is_dots(const char *name) { return !strcmp(name, ".") || !strcmp(name, ".."); }

static int try_rename(const char *from, const char *to, const struct owner *owner)
{
	struct place a, b;
	struct stat st;
	int rc = path_place(from, NULL, &a);

	if (rc)
		return rc;
	/* A missing source must not leave new directories behind. */
	if (fstatat(a.dir, a.name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		rc = errno;
	else
		rc = path_place(to, owner, &b);
	if (!rc) {
		if (is_dots(a.name) || is_dots(b.name))
			rc = EINVAL;
		else if (renameat(a.dir, a.name, b.dir, b.name) < 0)
			rc = errno;
		close(b.dir);
	}
	close(a.dir);
	return rc;
}

void op_move(uint32_t id, struct reader *r)
{
	struct move_request request = {.from = get_text(r), .to = get_text(r)};
	const char *user = get_text(r);
	struct owner owner;
	int rc;

	if (bad_path(id, r, request.from) || bad_path(id, r, request.to) || no_owner(id, user, &owner))
		return;
	rc = try_rename(request.from, request.to, &owner);
	if (rc == EXDEV)
		helper_start(id, walk_move, &request, false, "move");
	else if (rc)
		result_errno(id, rc, "move");
	else
		result_ok(id, FLAG_FIN);
}

/* Files and empty directories go at once; only a tree is worth a child. */
void op_remove(uint32_t id, struct reader *r)
{
	const char *path = get_text(r);
	struct place place;
	int rc;

	if (bad_path(id, r, path))
		return;
	rc = path_place(path, NULL, &place);
	if (!rc) {
		if (is_dots(place.name))
			rc = EINVAL;
		else if (unlinkat(place.dir, place.name, 0) < 0 && errno != ENOENT)
			rc = errno == EISDIR && unlinkat(place.dir, place.name, AT_REMOVEDIR) == 0 ? 0 : errno;
		close(place.dir);
	}
	if (rc == ENOTEMPTY || rc == EEXIST || rc == EISDIR)
		helper_start(id, walk_remove, path, false, "remove");
	else if (rc && rc != ENOENT)
		result_errno(id, rc, "remove");
	else
		result_ok(id, FLAG_FIN);
}
