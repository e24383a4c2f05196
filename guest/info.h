/* What the host is told about a file. */
#ifndef SANDYARD_INFO_H
#define SANDYARD_INFO_H

#include "wire.h"

#include <sys/stat.h>

/* Put the info record of PATH, whose last part is the entry NAME of DIRFD. Returns 0 or an errno. */
int info_put(struct writer *w, int dirfd, const char *name, const char *path);

#endif
