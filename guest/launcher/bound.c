/* What the kernel counts per user and not per control group, bounded for one sandbox.
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
#include <unistd.h>

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

int bound_user(const char *instances, const char *watches)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/%ld/ns/user", state_pid());
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWUSER) != 0)
        fail("limits", path);
    set("max_inotify_instances", instances);
    set("max_inotify_watches", watches);
    return 0;
}
