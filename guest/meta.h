/* A file's metadata: what clients attach to it, kept as the extended attributes `user.e2b.NAME`. */
#ifndef SANDYARD_META_H
#define SANDYARD_META_H

#include "wire.h"

enum {
	META_MAX = 4096,       /* of one file: names with their prefix, and values */
	META_SHOWN_MAX = 8192, /* how much of what others may have set is told */
};

/* Step over the list R stands at. 0, or EINVAL / E2BIG for a list that cannot become metadata. */
int meta_check(struct reader *r);
/* Make the list in R, checked before, the whole metadata of FD. Without a list (R at its end) FD has none
 * afterwards. 0 or an errno; ENOTSUP only where there is something to keep. */
int meta_replace(int fd, struct reader r);
/* Put the metadata of PATH (a link is followed) as a list, if it has any; returns whether it has. */
bool meta_put(struct writer *w, const char *path);
/* Copy the `user.` attributes. A file system without them loses them silently, as mv does. 0 or an errno. */
int meta_copy(int from, int to);

#endif
