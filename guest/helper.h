/* Long file work (a tree to list, remove or copy) in a forked child, so that it stalls nothing. */
#ifndef SANDYARD_HELPER_H
#define SANDYARD_HELPER_H

#include "link.h"

#include <sys/types.h>

/* Where the child writes records; buffered. */
struct sink {
	int fd;
	size_t used;
	uint8_t buf[PAYLOAD_MAX];
};

/* 0 or an errno. */
typedef int helper_work(const void *request, struct sink *sink);

/* Run WORK in a child and answer stream ID with what comes of it. With `streaming` its records
 * follow an empty RESULT. STEP (static) names the work in errors. */
void helper_start(uint32_t id, helper_work *work, const void *request, bool streaming, const char *step);
bool helper_reaped(pid_t pid, int status);
/* 0 or an errno. */
int sink_write(struct sink *sink, const void *data, size_t len);

#endif
