/* The root file system: read-only layers below, the sandbox's disk on top. */
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

static char layers[3072]; /* a mount's options are one page */

/* Directories are named by descriptor: no escaping, room for many, and the mount table that a
 * sandbox can read does not show where the host keeps its templates. */
static void name_of(const char *path, char *name, size_t size)
{
    int fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        fail("rootfs", path);
    snprintf(name, size, "/proc/self/fd/%d", fd);
}

void add_lower(const char *layer)
{
    char name[32];
    size_t used = strlen(layers);
    name_of(layer, name, sizeof name);
    int n = snprintf(layers + used, sizeof layers - used, "%s%s", used ? ":" : "", name);
    if (n >= (int)(sizeof layers - used)) {
        errno = E2BIG;
        fail("rootfs", "too many layers");
    }
}

void add_layer(const char *layer, const char *where)
{
    char upper[4096];
    mount_layer(layer, where);
    if (snprintf(upper, sizeof upper, "%s/upper", where) >= (int)sizeof upper) {
        errno = ENAMETOOLONG;
        fail("rootfs", where);
    }
    add_lower(upper); /* the next layer may cover it: its descriptor stays */
}

/* A disk that was in use before: the kernel refuses a work directory which a volatile mount has left. */
void renew_work(const char *work)
{
    static const char *const marks[] = {"work/incompat/volatile/dirty", "work/incompat/volatile", "work/incompat"};
    int fd = open(work, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        fail("rootfs", work);
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++)
        if (unlinkat(fd, marks[i], i ? AT_REMOVEDIR : 0) != 0 && errno != ENOENT)
            fail("rootfs", marks[i]);
    close(fd);
}

/* Volatile: what a sandbox syncs need not survive the host, and a flood of fsync must not reach the
 * host's disk. */
void mount_overlay(const char *upper, const char *work, const char *where)
{
    static const char *const extras[] = {",index=off,metacopy=off,volatile", ",index=off,metacopy=off", ""};
    static char options[4096];
    char top[32], scratch[32];
    name_of(upper, top, sizeof top);
    name_of(work, scratch, sizeof scratch);
    for (size_t i = 0; i < sizeof extras / sizeof *extras; i++) {
        snprintf(options, sizeof options, "lowerdir=%s,upperdir=%s,workdir=%s%s", layers, top, scratch, extras[i]);
        if (mount("overlay", where, "overlay", MS_NODEV | MS_NOATIME, options) == 0)
            return;
        if (errno != EINVAL) /* else: a kernel that does not know one of them */
            break;
    }
    fail("rootfs", "mount overlay");
}
