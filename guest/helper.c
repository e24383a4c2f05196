#include "helper.h"

#include "child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HELPERS_MAX = 64 };

struct helper {
	void *grave;
	struct helper *next;
	struct task task;
	struct source out;
	pid_t pid;
	int status;
	bool readable, exited, streaming, answered;
	struct stream *stream;
	const char *step;
};

static struct helper *helpers;
static int helper_count;

static int flush(struct sink *sink)
{
	for (size_t at = 0; at < sink->used;) {
		ssize_t n = write(sink->fd, sink->buf + at, sink->used - at);

		if (n < 0 && errno != EINTR)
			return errno;
		at += n > 0 ? (size_t)n : 0;
	}
	sink->used = 0;
	return 0;
}

int sink_write(struct sink *sink, const void *data, size_t len)
{
	int rc = sink->used + len > sizeof sink->buf ? flush(sink) : 0;

	if (rc || len > sizeof sink->buf)
		return rc ? rc : EOVERFLOW;
	memcpy(sink->buf + sink->used, data, len);
	sink->used += len;
	return 0;
}

static _Noreturn void run_child(helper_work *work, const void *request, int fd)
{
	static struct sink sink;
	int rc;

	child_reset();
	sink.fd = dup2(fd, 1);
#ifdef SYS_close_range
	syscall(SYS_close_range, 3U, ~0U, 0U);
#endif
	rc = work(request, &sink);
	if (!rc)
		rc = flush(&sink);
	_exit(rc);
}

static void discard(struct helper *h)
{
	for (struct helper **at = &helpers; *at; at = &(*at)->next)
		if (*at == h) {
			*at = h->next;
			break;
		}
	helper_count--;
	source_close(&h->out);
	task_drop(&h->task);
	bury(h);
}

static void finish(struct helper *h)
{
	int err = WIFEXITED(h->status) ? WEXITSTATUS(h->status) : ENOMEM;

	if (h->stream) {
		uint32_t id = h->stream->id;

		if (err)
			result_errno(id, err, h->step);
		else
			result_ok(id, FLAG_FIN);
		stream_free(h->stream);
	}
	discard(h);
}

/* True if there may be more that credit allows. */
static bool forward(struct helper *h)
{
	struct stream *s = h->stream;
	size_t want = s->tx_credit[CH_OUT] < PAYLOAD_MAX ? s->tx_credit[CH_OUT] : PAYLOAD_MAX;
	struct writer w;
	ssize_t n;

	if (h->out.fd < 0 || !h->readable || !want)
		return false;
	w = frame_begin();
	n = read(h->out.fd, w.p, want);
	if (n > 0) {
		w.p += n;
		frame_end(&w, F_DATA, CH_OUT, 0, s->id);
		s->tx_credit[CH_OUT] -= (uint32_t)n;
		return true;
	}
	if (n < 0 && errno == EINTR)
		return true;
	if (n < 0 && errno == EAGAIN)
		h->readable = false;
	else
		source_close(&h->out);
	return false;
}

static enum progress run(struct task *task)
{
	struct helper *h = CONTAINER(task, struct helper, task);
	bool more;

	if (!h->stream) {
		source_close(&h->out);
		if (h->exited)
			discard(h);
		return IDLE;
	}
	if (!link_room())
		return BLOCKED;
	if (h->streaming && !h->answered)
		result_ok(h->stream->id, 0);
	h->answered = true;
	if (!link_room())
		return BLOCKED;
	more = forward(h);
	if (h->exited && h->out.fd < 0) {
		if (!link_room())
			return BLOCKED;
		finish(h);
		return IDLE;
	}
	return more ? AGAIN : IDLE;
}

static void on_ready(struct source *source, uint32_t events)
{
	struct helper *h = CONTAINER(source, struct helper, out);

	(void)events;
	h->readable = true;
	task_wake(&h->task);
}

static void on_credit(struct stream *s) { task_wake(&((struct helper *)s->impl)->task); }

static void on_close(struct stream *s)
{
	struct helper *h = s->impl;

	h->stream = NULL;
	if (!h->exited)
		kill(h->pid, SIGKILL);
	task_wake(&h->task);
}

static const struct stream_ops ops = {.credit = on_credit, .close = on_close};

bool helper_reaped(pid_t pid, int status)
{
	for (struct helper *h = helpers; h; h = h->next)
		if (h->pid == pid && !h->exited) {
			h->exited = true;
			h->status = status;
			task_wake(&h->task);
			return true;
		}
	return false;
}

static int start(struct helper *h, helper_work *work, const void *request)
{
	int fds[2], rc;

	if (pipe2(fds, O_CLOEXEC) < 0)
		return errno;
	rc = -source_open(&h->out, fds[0], EPOLLIN, on_ready);
	if (rc)
		close(fds[0]);
	h->pid = rc ? -1 : fork();
	if (h->pid == 0)
		run_child(work, request, fds[1]);
	if (!rc && h->pid < 0)
		rc = errno;
	close(fds[1]);
	return rc;
}

void helper_start(uint32_t id, helper_work *work, const void *request, bool streaming, const char *step)
{
	struct helper *h = helper_count < HELPERS_MAX ? calloc(1, sizeof *h) : NULL;
	int rc = h ? 0 : EAGAIN;

	if (h) {
		h->out.fd = -1;
		h->task.run = run;
		h->streaming = streaming;
		h->step = step;
		h->next = helpers;
		helpers = h;
		helper_count++;
		h->stream = stream_new(id, &ops, h, WINDOW_OTHER);
		rc = h->stream ? start(h, work, request) : ENOMEM;
	}
	if (!rc) {
		task_wake(&h->task);
		return;
	}
	result_errno(id, rc, step);
	if (h && h->stream)
		stream_free(h->stream);
	if (h)
		discard(h);
}
