#include "proc.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void queue_init(struct queue *q)
{
	q->head = NULL;
	q->tail = &q->head;
	q->bytes = 0;
}

bool queue_push(struct queue *q, const uint8_t *data, uint32_t len)
{
	struct chunk *c = len ? malloc(sizeof *c + len) : NULL;

	if (!c)
		return len == 0;
	c->next = NULL;
	c->len = len;
	c->at = 0;
	memcpy(c->data, data, len);
	*q->tail = c;
	q->tail = &c->next;
	q->bytes += len;
	return true;
}

static void pop(struct queue *q)
{
	struct chunk *c = q->head;

	q->head = c->next;
	if (!q->head)
		q->tail = &q->head;
	free(c);
}

void queue_clear(struct queue *q)
{
	while (q->head)
		pop(q);
	q->bytes = 0;
}

bool queue_flush(struct queue *q, int fd, uint32_t *written)
{
	while (q->head) {
		struct chunk *c = q->head;
		ssize_t n = write(fd, c->data + c->at, c->len - c->at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return errno == EAGAIN;
		c->at += (uint32_t)n;
		q->bytes -= (uint32_t)n;
		*written += (uint32_t)n;
		if (c->at == c->len)
			pop(q);
	}
	return true;
}
