#include "path.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int path_check(const char *path)
{
	if (path[0] != '/')
		return EINVAL;
	return strlen(path) >= PATH_MAX ? ENAMETOOLONG : 0;
}

static int enter(int dir, const char *name, const struct owner *owner)
{
	int fd = openat(dir, name, O_PATH | O_DIRECTORY | O_CLOEXEC);

	if (fd >= 0 || errno != ENOENT || !owner)
		return fd;
	if (mkdirat(dir, name, 0755) < 0)
		return errno == EEXIST ? openat(dir, name, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
	/* Whatever was put there since, it is not followed: the owner is set on a directory we hold. */
	fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (fd >= 0 && fchown(fd, owner->uid, owner->gid) < 0) {
		int err = errno;

		close(fd);
		errno = err;
		return -1;
	}
	return fd;
}

/* Copy the next part of *PATH and step over it; false at the end. */
static int next_part(const char **path, char *part)
{
	size_t len;

	*path += strspn(*path, "/");
	len = strcspn(*path, "/");
	if (len > NAME_MAX)
		return ENAMETOOLONG;
	memcpy(part, *path, len);
	part[len] = 0;
	*path += len;
	*path += strspn(*path, "/");
	return 0;
}

int path_place(const char *path, const struct owner *owner, struct place *place)
{
	int rc = path_check(path), next;

	if (rc)
		return rc;
	place->dir = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (place->dir < 0)
		return errno;
	for (;;) {
		rc = next_part(&path, place->name);
		if (rc || !*path)
			break;
		next = enter(place->dir, place->name, owner);
		rc = next < 0 ? errno : 0;
		close(place->dir);
		place->dir = next;
		if (rc)
			return rc;
	}
	if (!rc && !place->name[0])
		strcpy(place->name, ".");
	if (rc)
		close(place->dir);
	return rc;
}
