#include "loop.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

static int epoll_fd = -1;
static struct task ready_list = {.next = &ready_list, .prev = &ready_list};
static struct task blocked_list = {.next = &blocked_list, .prev = &blocked_list};
static void **graveyard;

int loop_init(void)
{
	epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	return epoll_fd < 0 ? -errno : 0;
}

int source_open(struct source *source, int fd, uint32_t events, void (*ready)(struct source *, uint32_t))
{
	struct epoll_event event = {.events = events | EPOLLET, .data.ptr = source};

	source->ready = ready;
	source->fd = -1;
	if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) < 0 ||
	    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0)
		return -errno;
	source->fd = fd;
	return 0;
}

void source_close(struct source *source)
{
	if (source->fd < 0)
		return;
	/* A child between fork and exec may still hold the file, so that closing would not take it out of the set. */
	epoll_ctl(epoll_fd, EPOLL_CTL_DEL, source->fd, NULL);
	close(source->fd);
	source->fd = -1;
}

static void append(struct task *list, struct task *task)
{
	task->prev = list->prev;
	task->next = list;
	list->prev->next = task;
	list->prev = task;
}

void task_drop(struct task *task)
{
	if (!task->next)
		return;
	task->next->prev = task->prev;
	task->prev->next = task->next;
	task->next = task->prev = NULL;
}

void task_wake(struct task *task)
{
	if (!task->next)
		append(&ready_list, task);
}

void tasks_unblock(void)
{
	while (blocked_list.next != &blocked_list) {
		struct task *task = blocked_list.next;

		task_drop(task);
		append(&ready_list, task);
	}
}

void bury(void *p)
{
	*(void **)p = graveyard;
	graveyard = p;
}

static void empty_graveyard(void)
{
	while (graveyard) {
		void *dead = graveyard;

		graveyard = *(void **)dead;
		free(dead);
	}
}

uint64_t now_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

static void run_tasks(void)
{
	struct task mark = {0};

	append(&ready_list, &mark);
	while (ready_list.next != &mark) {
		struct task *task = ready_list.next;
		enum progress progress;

		task_drop(task);
		progress = task->run(task);
		/* A task that freed itself says IDLE; one that was woken while it ran is queued already. */
		if (progress == IDLE || task->next)
			continue;
		append(progress == AGAIN ? &ready_list : &blocked_list, task);
	}
	task_drop(&mark);
}

_Noreturn void loop_run(int (*next_timeout)(void), void (*on_round)(void))
{
	struct epoll_event events[64];

	for (;;) {
		int n;

		run_tasks();
		on_round();
		empty_graveyard();
		n = epoll_wait(epoll_fd, events, 64, ready_list.next != &ready_list ? 0 : next_timeout());
		for (int i = 0; i < n; i++) {
			struct source *source = events[i].data.ptr;

			if (source->fd >= 0)
				source->ready(source, events[i].events);
		}
	}
}
