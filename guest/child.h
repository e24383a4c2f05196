/* The side of a spawn that runs in the child, between fork and exec. */
#ifndef SANDYARD_CHILD_H
#define SANDYARD_CHILD_H

#include "wire.h"

#include <sys/ioctl.h>

struct launch {
	uint8_t flags;
	struct winsize size;
	const char *user, *cwd;
	uint32_t argc, envc;
	struct reader argv, env; /* at the first string of each */
	uint64_t mark;
	int in, out, err, report;
};

struct report {
	int code, err;
	char step[16];
};

_Noreturn void child_run(struct launch *l);
/* For every fork: default signals, none blocked, the first candidate when memory runs out. */
void child_reset(void);

/* The limit on open files that children start with; the agent's own may be higher. */
extern struct rlimit child_files;
/* `cgroup.procs` of the group that children join; -1 where there is none. */
extern int child_group;

#endif
