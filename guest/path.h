/* Finding, and making, the directory a path leads to. */
#ifndef SANDYARD_PATH_H
#define SANDYARD_PATH_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct owner {
	uint32_t uid, gid;
};

/* An entry of an open directory. */
struct place {
	int dir; /* O_PATH; the caller closes it */
	char name[NAME_MAX + 1];
};

/* Absolute, not too long, and not "/" itself where `entry` is set. 0 or an errno. */
int path_check(const char *path);
/* Open the directory that holds the last part of PATH. With OWNER missing directories are made,
 * belonging to it. Symlinks on the way are followed, as for any path. 0 or an errno; on success the
 * last part is in `place->name` ("." for the root). */
int path_place(const char *path, const struct owner *owner, struct place *place);

#endif
