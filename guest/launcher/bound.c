/* What an engine does not do for a sandbox: a boot id of its own, and bounds on what the kernel counts per
 * user and not per control group.
 *
 * Runs as the engine's createRuntime hook, which gets the state of the container on stdin. A user
 * namespace is charged to whoever made it as well, here the host's root: without a limit of its own a
 * sandbox could take every inotify instance of the host. */
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef OPEN_TREE_CLONE /* older headers; the kernel has both calls since 5.2 */
#define OPEN_TREE_CLONE 1
#define OPEN_TREE_CLOEXEC O_CLOEXEC
#endif
#ifndef MOVE_MOUNT_F_EMPTY_PATH
#define MOVE_MOUNT_F_EMPTY_PATH 4
#endif
#ifndef SYS_open_tree
#define SYS_open_tree 428
#define SYS_move_mount 429
#endif

/* PID of the container in the state on stdin; 0 where there is none. */
static long state_pid(void)
{
    static char state[1 << 16];
    size_t size = fread(state, 1, sizeof state - 1, stdin);
    char *at = strstr(state, "\"pid\"");
    state[size] = 0;
    return at ? strtol(at + 5 + strspn(at + 5, " \t\r\n:"), NULL, 10) : 0;
}

static void set(const char *name, const char *value)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/sys/user/%s", name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 && (errno == ENOENT || errno == EROFS)) /* a host that does not let us: doctor says so */
        return;
    if (fd < 0 || write(fd, value, strlen(value)) < 0)
        fail("limits", path);
    close(fd);
}

static int namespace_of(long pid, const char *name)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/%ld/ns/%s", pid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        fail("limits", path);
    return fd;
}

/* Engines refuse mounts below /proc; the kernel does not. */
static void own_boot_id(int tree, const char *rootfs)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/proc/sys/kernel/random/boot_id", rootfs);
    if (syscall(SYS_move_mount, tree, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH) != 0)
        fail("boot id", path);
}

int finish_sandbox(const char *instances, const char *watches, const char *boot_id, const char *rootfs)
{
    long pid = state_pid();
    int users = namespace_of(pid, "user"), mounts = namespace_of(pid, "mnt");
    int tree = (int)syscall(SYS_open_tree, AT_FDCWD, boot_id, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (tree < 0)
        fail("boot id", boot_id);
    if (setns(users, CLONE_NEWUSER) != 0)
        fail("limits", "user namespace");
    set("max_inotify_instances", instances); /* by the host's /proc: the sandbox's own is read-only */
    set("max_inotify_watches", watches);
    if (setns(mounts, CLONE_NEWNS) != 0)
        fail("boot id", "mount namespace");
    own_boot_id(tree, rootfs);
    return 0;
}
