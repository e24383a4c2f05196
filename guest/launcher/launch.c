/* sandyard-launch: the last step on the host before an OCI engine takes over.
 *
 * It makes a private mount namespace, mounts a sandbox's disk and root file system there and nowhere
 * else, and becomes the engine. Whatever dies afterwards, at any step, the kernel takes every mount
 * and the loop device with it: nothing can be left on the host.
 *
 *   sandyard-launch --parent PID [--unmount DIR]...
 *                   [--clone TEMPLATE IMAGE] [--loop IMAGE DIR]
 *                   [--write FILE OWNER TEXT]... [--renew WORK]
 *                   [--lower DIR | --layer IMAGE DIR]... --overlay UPPER WORK DIR
 *                   [--fd N] -- ENGINE ARG...
 *   sandyard-launch --finish INSTANCES WATCHES BOOT_ID ROOTFS < STATE   (a hook, see bound.c)
 *
 * Steps run in the order they are given; the topmost of `--lower` and `--layer` comes first. `--fd N`
 * becomes descriptor 3 of the engine. Errors are one line on stderr, "STEP: what: why", exit status 125.
 */
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

void fail(const char *step, const char *what)
{
    fprintf(stderr, "%s: %s: %s\n", step, what, strerror(errno));
    _exit(125);
}

/* The engine must not outlive a server that was killed: it would finish a sandbox nobody knows. */
static void die_with(const char *parent)
{
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
        fail("parent", "PR_SET_PDEATHSIG");
    if (getppid() != (pid_t)strtol(parent, NULL, 10)) {
        errno = ESRCH;
        fail("parent", parent);
    }
}

static void private_mounts(void)
{
    if (unshare(CLONE_NEWNS) != 0)
        fail("namespace", "unshare");
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        fail("namespace", "make mounts private");
}

/* Here, not in the engine: within the user namespace a hard limit cannot be raised any more. */
static void set_limits(void)
{
    /* Queued signals are charged to the host's root too: all sandboxes together must not fill its queue. */
    const struct rlimit files = {65536, 65536}, core = {0, 0}, queued = {1024, 1024};
    struct rlimit now;
    if (setrlimit(RLIMIT_NOFILE, &files) != 0 && getrlimit(RLIMIT_NOFILE, &now) == 0) {
        now.rlim_cur = now.rlim_max; /* as many as this host lets us have */
        if (setrlimit(RLIMIT_NOFILE, &now) != 0)
            fail("limits", "RLIMIT_NOFILE");
    }
    if (setrlimit(RLIMIT_CORE, &core) != 0)
        fail("limits", "RLIMIT_CORE");
    if (setrlimit(RLIMIT_SIGPENDING, &queued) != 0)
        fail("limits", "RLIMIT_SIGPENDING");
}

static void become(char **engine, int fd)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    int errors = fcntl(2, F_DUPFD_CLOEXEC, 10); /* for the one line, should exec fail */
    if (null < 0 || errors < 0)
        fail("engine", "/dev/null");
    if (fd >= 0 && fd != 3 && dup2(fd, 3) < 0)
        fail("engine", "descriptor");
    if (fd == 3 && fcntl(3, F_SETFD, 0) != 0)
        fail("engine", "descriptor");
    for (int i = 0; i < 3; i++)
        if (dup2(null, i) < 0)
            fail("engine", "stdio");
    execv(engine[0], engine);
    dprintf(errors, "engine: %s: %s\n", engine[0], strerror(errno));
    _exit(125);
}

/* How many words follow an option; -1 for an unknown one. */
static int arity(const char *option)
{
    static const struct { const char *name; int words; } table[] = {
        {"--parent", 1}, {"--unmount", 1}, {"--clone", 2}, {"--loop", 2},
        {"--write", 3}, {"--renew", 1}, {"--lower", 1}, {"--layer", 2}, {"--overlay", 3}, {"--fd", 1},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strcmp(option, table[i].name) == 0)
            return table[i].words;
    return -1;
}

int main(int argc, char **argv)
{
    int fd = -1, at = 1, is_private = 0;
    if (argc == 6 && strcmp(argv[1], "--finish") == 0)
        return finish_sandbox(argv[2], argv[3], argv[4], argv[5]);
    while (at < argc && strcmp(argv[at], "--") != 0) {
        const char *option = argv[at];
        char **word = argv + at + 1;
        int words = arity(option);
        if (words < 0 || at + words >= argc) {
            errno = EINVAL;
            fail("arguments", option);
        }
        int mounts = strcmp(option, "--unmount") == 0 || strcmp(option, "--loop") == 0 ||
                     strcmp(option, "--layer") == 0 || strcmp(option, "--overlay") == 0;
        if (mounts && !is_private) {
            private_mounts();
            is_private = 1;
        }
        if (strcmp(option, "--parent") == 0)
            die_with(word[0]);
        else if (strcmp(option, "--unmount") == 0) {
            if (umount2(word[0], MNT_DETACH) != 0 && errno != EINVAL && errno != ENOENT)
                fail("unmount", word[0]);
        } else if (strcmp(option, "--clone") == 0)
            clone_image(word[0], word[1]);
        else if (strcmp(option, "--loop") == 0)
            mount_image(word[0], word[1]);
        else if (strcmp(option, "--write") == 0)
            write_new(word[0], word[1], word[2]);
        else if (strcmp(option, "--renew") == 0)
            renew_work(word[0]);
        else if (strcmp(option, "--lower") == 0)
            add_lower(word[0]);
        else if (strcmp(option, "--layer") == 0)
            add_layer(word[0], word[1]);
        else if (strcmp(option, "--overlay") == 0)
            mount_overlay(word[0], word[1], word[2]);
        else
            fd = (int)strtol(word[0], NULL, 10);
        at += words + 1;
    }
    if (at + 1 >= argc) {
        errno = EINVAL;
        fail("arguments", "no engine");
    }
    set_limits();
    become(argv + at + 1, fd);
}
