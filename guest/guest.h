/* PID 1 of a guest kernel: from the initial RAM disk to the sandbox's own root. */
#ifndef SANDYARD_GUEST_H
#define SANDYARD_GUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether this process is the first of a guest kernel, started from the RAM disk the host wrote. */
bool guest_is_ours(void);
/* Load modules, mount the sandbox's disks, move there. Returns the port to the host; on failure tells
 * the console and ends, which ends the guest. */
int guest_enter(void);
/* Hold the sandbox's disk still with everything on it, or let it go on; hold every process that was started, or
 * let them go on; an errno. The disk goes on by itself after a few seconds, so that a host which is lost between
 * the two leaves no sandbox stuck. Processes do not: a copy's must not run before it was told who it is. */
int guest_freeze(bool disk, bool processes);

/* Apply records (see PROTOCOL.md), which an empty one ends; an errno, with *FAILED the record it is about. */
int guest_configure(const char *records, const char **failed);

/* What the sandbox uses: bytes, but for the last two. `disk` counts also what is on its way there. */
struct guest_use {
	uint64_t disk, memory, cache, pids, oom_kills;
};

/* Zeros where there is no guest kernel of ours. */
void guest_use(struct guest_use *use);

/* Whether LEN bytes more may be written to FD: a file in memory counts as the sandbox's, whoever writes it. */
bool guest_has_room(int fd, size_t len);
/* Give back what such files no longer take. */
void guest_settle(void);

#endif
