/* Processes of the sandbox that the host started. A process outlives its stream and its link. */
#ifndef SANDYARD_PROC_H
#define SANDYARD_PROC_H

#include "child.h"
#include "link.h"

#include <sys/types.h>

struct chunk {
	struct chunk *next;
	uint32_t len, at;
	uint8_t data[];
};

/* Bytes from the host that wait for a slow reader; bounded by the credit given. */
struct queue {
	struct chunk *head, **tail;
	uint32_t bytes;
};

void queue_init(struct queue *q);
bool queue_push(struct queue *q, const uint8_t *data, uint32_t len);
void queue_clear(struct queue *q);
/* Write to FD until it would block; adds to *WRITTEN. False on an error other than EAGAIN. */
bool queue_flush(struct queue *q, int fd, uint32_t *written);

struct output {
	struct source source;
	bool readable, ended; /* ended: EOF was sent, what still comes is dropped */
	int64_t left;         /* bytes still to deliver, -1: no limit */
};

struct proc {
	void *grave;
	struct proc *next;
	struct task task;
	pid_t pid;
	uint64_t mark; /* see tree.c */
	bool pty, started, exited, told, answered;
	bool input_eof, input_gone;
	int status;
	uint64_t deadline; /* 0: none */
	uint64_t dropped;
	struct source input, report;
	struct report failure; /* code != 0: nothing was started */
	struct output out[2];
	struct queue queue;
	struct stream *stream;
	uint8_t *spec;
	uint32_t spec_len;
};

extern const struct stream_ops proc_stream_ops;
extern struct proc *procs;

struct proc *proc_new(void);
void proc_discard(struct proc *proc);
void proc_on_output(struct source *source, uint32_t events);
void proc_on_error(struct source *source, uint32_t events);
void proc_on_input(struct source *source, uint32_t events);
/* Reap every dead child, ours or adopted. */
void proc_reap(void);
uint32_t proc_count(void);
uint64_t proc_dropped(void);
/* Milliseconds to the next drain deadline, or -1. */
int proc_timeout(void);
void proc_deadlines(void);

/* tree.c */
uint64_t tree_mark(void);
void tree_init(void);
void tree_kill(pid_t root, uint64_t mark);

#endif
