/* One thread, one epoll set, edge-triggered: a source tells that its file is ready, a task does a
 * bounded slice of work. Nothing polls; an idle agent sleeps in epoll_wait without a timeout. */
#ifndef SANDYARD_LOOP_H
#define SANDYARD_LOOP_H

#include <stdbool.h>
#include <stdint.h>

struct source {
	int fd; /* -1: closed; late events are dropped */
	void (*ready)(struct source *source, uint32_t events);
};

enum progress {
	IDLE,    /* nothing to do until it is woken */
	AGAIN,   /* more to do */
	BLOCKED, /* waits for room towards the host */
};

struct task {
	struct task *next, *prev;
	enum progress (*run)(struct task *task);
};

#define CONTAINER(ptr, type, member) ((type *)(void *)((char *)(ptr) - __builtin_offsetof(type, member)))

int loop_init(void);
/* Takes over FD (made non-blocking, close-on-exec); on failure FD stays the caller's. */
int source_open(struct source *source, int fd, uint32_t events, void (*ready)(struct source *, uint32_t));
void source_close(struct source *source);
void task_wake(struct task *task);
void task_drop(struct task *task);
void tasks_unblock(void);
/* Free P (whose first member must be `void *grave`) once no event of this round can name it. */
void bury(void *p);
uint64_t now_ms(void);
/* Runs for ever. `next_timeout` gives milliseconds or -1, `on_round` runs once a round. */
_Noreturn void loop_run(int (*next_timeout)(void), void (*on_round)(void));

#endif
