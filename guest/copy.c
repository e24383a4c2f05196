/* Moving across file systems: copy beside the destination, rename over it, remove the source. */
#include "walk.h"

#include "guest.h"
#include "meta.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DEPTH_MAX = 256, COPY_MAX = 1 << 20 };

static int copy_entry(int from, const char *name, int to, const char *to_name, int depth);

static int copy_data(int in, int out)
{
	ssize_t n;

	do {
		if (!guest_has_room(out, COPY_MAX))
			return ENOMEM;
		n = sendfile(out, in, NULL, COPY_MAX);
		if (n < 0 && errno != EINTR)
			return errno;
	} while (n != 0);
	return 0;
}

/* Owner before mode: changing the owner clears the set-id bits. */
static int copy_attributes(int fd, const struct stat *st)
{
	struct timespec times[2] = {st->st_atim, st->st_mtim};

	if (fchown(fd, st->st_uid, st->st_gid) < 0 || fchmod(fd, st->st_mode & 07777) < 0 || futimens(fd, times) < 0)
		return errno;
	return 0;
}

static int copy_file(int from, const char *name, int to, const char *to_name, const struct stat *st)
{
	int in = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), out, rc;

	if (in < 0)
		return errno;
	out = openat(to, to_name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	rc = out < 0 ? errno : copy_data(in, out);
	if (!rc)
		rc = meta_copy(in, out);
	if (!rc)
		rc = copy_attributes(out, st);
	close(in);
	if (out >= 0 && close(out) < 0 && !rc)
		rc = errno;
	return rc;
}

static int copy_entries(int from, int to, int depth)
{
	DIR *dir = fdopendir(from);
	struct dirent *entry;
	int rc = 0;

	if (!dir)
		return errno;
	while (!rc && (errno = 0, entry = readdir(dir)))
		if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
			rc = copy_entry(dirfd(dir), entry->d_name, to, entry->d_name, depth + 1);
	rc = rc ? rc : errno;
	closedir(dir);
	return rc;
}

static int copy_directory(int from, const char *name, int to, const char *to_name, const struct stat *st, int depth)
{
	int in, out, rc;

	if (depth >= DEPTH_MAX)
		return ENAMETOOLONG;
	in = openat(from, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (in < 0)
		return errno;
	rc = mkdirat(to, to_name, 0700) < 0 ? errno : 0;
	out = rc ? -1 : openat(to, to_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (out < 0) {
		rc = rc ? rc : errno;
		close(in);
		return rc;
	}
	rc = meta_copy(in, out);
	if (rc)
		close(in);
	else
		rc = copy_entries(in, out, depth); /* takes over `in` */
	if (!rc)
		rc = copy_attributes(out, st);
	close(out);
	return rc;
}

static int copy_special(int from, const char *name, int to, const char *to_name, const struct stat *st)
{
	char target[PATH_MAX];
	ssize_t n;

	if (S_ISLNK(st->st_mode)) {
		n = readlinkat(from, name, target, sizeof target - 1);
		target[n < 0 ? 0 : n] = 0;
		if (n < 0 || symlinkat(target, to, to_name) < 0)
			return errno;
	} else if (mknodat(to, to_name, st->st_mode, st->st_rdev) < 0) {
		return errno;
	}
	return fchownat(to, to_name, st->st_uid, st->st_gid, AT_SYMLINK_NOFOLLOW) < 0 ? errno : 0;
}

static int copy_entry(int from, const char *name, int to, const char *to_name, int depth)
{
	struct stat st;

	if (fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return errno;
	if (S_ISDIR(st.st_mode))
		return copy_directory(from, name, to, to_name, &st, depth);
	if (S_ISREG(st.st_mode))
		return copy_file(from, name, to, to_name, &st);
	return copy_special(from, name, to, to_name, &st);
}

int walk_move(const void *request, struct sink *sink)
{
	const struct move_request *r = request;
	struct place from, to;
	char beside[64];
	int rc = path_place(r->from, NULL, &from);

	(void)sink;
	if (!rc)
		rc = path_place(r->to, NULL, &to);
	if (rc)
		return rc;
	snprintf(beside, sizeof beside, ".moving-%d", (int)getpid());
	rc = copy_entry(from.dir, from.name, to.dir, beside, 0);
	if (!rc && renameat(to.dir, beside, to.dir, to.name) < 0)
		rc = errno;
	if (rc) {
		remove_tree(to.dir, beside);
		return rc;
	}
	return remove_tree(from.dir, from.name);
}
