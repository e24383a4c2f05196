#include "proc.h"

#include "helper.h"
#include "ops.h"
#include "watch.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { DRAIN_MS = 200, UNTOLD_MAX = 64 };

struct proc *procs;
static uint64_t dropped_total;
static uint32_t deadlines;

static enum progress proc_run(struct task *task);

struct proc *proc_new(void)
{
	struct proc *p = calloc(1, sizeof *p);

	if (!p)
		return NULL;
	p->task.run = proc_run;
	p->input.fd = p->report.fd = p->out[0].source.fd = p->out[1].source.fd = -1;
	p->out[0].left = p->out[1].left = -1;
	queue_init(&p->queue);
	p->next = procs;
	procs = p;
	return p;
}

static void clear_deadline(struct proc *p)
{
	if (p->deadline)
		deadlines--;
	p->deadline = 0;
}

void proc_discard(struct proc *p)
{
	for (struct proc **at = &procs; *at; at = &(*at)->next)
		if (*at == p) {
			*at = p->next;
			break;
		}
	if (p->stream)
		stream_free(p->stream);
	source_close(&p->input);
	source_close(&p->report);
	source_close(&p->out[0].source);
	source_close(&p->out[1].source);
	queue_clear(&p->queue);
	clear_deadline(p);
	task_drop(&p->task);
	free(p->spec);
	bury(p);
}

static struct proc *proc_find(uint32_t pid)
{
	struct proc *ended = NULL;

	for (struct proc *p = procs; p; p = p->next)
		if (p->started && !p->failure.code && (uint32_t)p->pid == pid) {
			if (!p->exited)
				return p;
			if (!p->told)
				ended = p;
		}
	return ended;
}

static bool is_running(const struct proc *p) { return p->started && !p->failure.code && !p->exited; }

uint32_t proc_count(void)
{
	uint32_t n = 0;

	for (struct proc *p = procs; p; p = p->next)
		n += is_running(p);
	return n;
}

uint64_t proc_dropped(void) { return dropped_total; }

/* --- input --- */

static void input_close(struct proc *p, bool gone)
{
	p->input_gone |= gone && p->input.fd >= 0;
	source_close(&p->input);
	queue_clear(&p->queue);
}

static void input_flush(struct proc *p)
{
	uint32_t written = 0;

	if (p->input.fd < 0)
		return;
	if (!queue_flush(&p->queue, p->input.fd, &written))
		input_close(p, true);
	else if (p->input_eof && !p->queue.head && !p->pty)
		input_close(p, false);
	if (p->stream && written)
		stream_consumed(p->stream, written);
}

static void on_data(struct stream *s, const uint8_t *data, uint32_t len)
{
	struct proc *p = s->impl;

	if (p->input.fd < 0 || p->input_eof)
		return;
	if (!queue_push(&p->queue, data, len))
		input_close(p, true);
	input_flush(p);
	task_wake(&p->task);
}

static void on_eof(struct stream *s, uint8_t channel)
{
	struct proc *p = s->impl;
	uint8_t end_of_file = 4; /* what a terminal's line discipline takes for one */

	if (channel == CH_IN && p->pty && p->input.fd >= 0) {
		queue_push(&p->queue, &end_of_file, 1);
		input_flush(p);
	} else if (channel == CH_IN) {
		p->input_eof = true;
		input_flush(p);
	} else {
		p->out[channel - 1].ended = true;
	}
	task_wake(&p->task);
}

static void on_credit(struct stream *s) { task_wake(&((struct proc *)s->impl)->task); }

static void on_close(struct stream *s)
{
	struct proc *p = s->impl;

	p->stream = NULL;
	task_wake(&p->task);
}

const struct stream_ops proc_stream_ops = {.data = on_data, .eof = on_eof, .credit = on_credit, .close = on_close};

/* --- output --- */

static void on_output(struct proc *p, struct output *out, uint32_t events)
{
	if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
		out->readable = true;
		task_wake(&p->task);
	}
}

void proc_on_output(struct source *source, uint32_t events)
{
	struct proc *p = CONTAINER(source, struct proc, out[0].source);

	on_output(p, &p->out[0], events);
}

void proc_on_error(struct source *source, uint32_t events)
{
	struct proc *p = CONTAINER(source, struct proc, out[1].source);

	on_output(p, &p->out[1], events);
}

void proc_on_input(struct source *source, uint32_t events)
{
	struct proc *p = CONTAINER(source, struct proc, input);

	if (events & EPOLLERR && !p->pty)
		input_close(p, true);
	/* The credit this gives back needs room, so it is the task that writes. */
	task_wake(&p->task);
}

static bool read_failed(struct output *out)
{
	if (errno == EINTR)
		return false;
	if (errno == EAGAIN)
		out->readable = false;
	else
		source_close(&out->source); /* EIO: the last user of the terminal is gone */
	return true;
}

/* Read and drop a bounded slice; true if there may be more. */
static bool drop_output(struct proc *p, struct output *out)
{
	static uint8_t scratch[PAYLOAD_MAX];

	for (int i = 0; i < 4 && out->source.fd >= 0 && out->readable; i++) {
		ssize_t n = read(out->source.fd, scratch, sizeof scratch);

		if (n > 0) {
			p->dropped += (uint64_t)n;
			dropped_total += (uint64_t)n;
		} else if (n == 0) {
			source_close(&out->source);
		} else if (read_failed(out)) {
			break;
		}
	}
	return out->source.fd >= 0 && out->readable;
}

/* Send one frame of output; true if there may be more that credit allows. */
static bool send_output(struct proc *p, int index)
{
	struct output *out = &p->out[index];
	struct stream *s = p->stream;
	uint8_t channel = (uint8_t)(CH_OUT + index);
	struct writer w;
	size_t want = PAYLOAD_MAX;
	ssize_t n;

	if (out->source.fd >= 0 && out->left != 0) {
		if (!out->readable || s->tx_credit[channel] == 0)
			return false;
		if (want > s->tx_credit[channel])
			want = s->tx_credit[channel];
		if (out->left > 0 && want > (uint64_t)out->left)
			want = (size_t)out->left;
		w = frame_begin();
		n = read(out->source.fd, w.p, want);
		if (n > 0) {
			w.p += n;
			frame_end(&w, F_DATA, channel, 0, s->id);
			s->tx_credit[channel] -= (uint32_t)n;
			if (out->left > 0)
				out->left -= n;
			return true;
		}
		if (n < 0 && !read_failed(out))
			return true;
		if (n == 0)
			source_close(&out->source);
		if (out->source.fd >= 0)
			return false;
	}
	out->ended = true;
	frame_send(F_EOF, channel, 0, s->id);
	return false;
}

static void send_exit(struct proc *p)
{
	bool killed = WIFSIGNALED(p->status);
	struct writer w;

	watches_flush();
	w = frame_begin();
	put_u8(&w, killed);
	put_u32(&w, (uint32_t)(killed ? WTERMSIG(p->status) : WEXITSTATUS(p->status)));
	frame_end(&w, F_EXIT, 0, 0, p->stream->id);
	p->told = true;
}

static void send_answer(struct proc *p)
{
	struct writer w = result_begin();

	put_u32(&w, (uint32_t)p->pid);
	put_u32(&w, p->stream->rx_credit);
	if (p->answered && p->spec_len <= PAYLOAD_MAX - 64)
		put_bytes(&w, p->spec, p->spec_len);
	result_end(&w, 0, p->stream->id);
	p->answered = true;
}

/* Whether everything was told, and the stream can end. */
static bool all_told(const struct proc *p) { return p->told && p->out[0].ended && p->out[1].ended; }

static enum progress run_detached(struct proc *p)
{
	bool more = drop_output(p, &p->out[0]);

	more |= drop_output(p, &p->out[1]);
	if (p->exited && p->told && p->out[0].source.fd < 0 && p->out[1].source.fd < 0) {
		proc_discard(p);
		return IDLE;
	}
	return more ? AGAIN : IDLE;
}

static enum progress run_attached(struct proc *p)
{
	bool more = false;

	for (int i = 0; i < 2; i++) {
		if (!link_room())
			return BLOCKED;
		more |= p->out[i].ended ? drop_output(p, &p->out[i]) : send_output(p, i);
	}
	if (!link_room())
		return BLOCKED;
	if (p->input_gone) {
		p->input_gone = false;
		frame_send(F_EOF, CH_IN, 0, p->stream->id);
	}
	if (p->exited && !p->told)
		send_exit(p);
	if (all_told(p)) {
		result_ok(p->stream->id, FLAG_FIN);
		stream_free(p->stream);
		p->stream = NULL;
		clear_deadline(p);
		return run_detached(p);
	}
	return more ? AGAIN : IDLE;
}

static enum progress proc_run(struct task *task)
{
	struct proc *p = CONTAINER(task, struct proc, task);

	if (!p->started)
		return IDLE;
	if (p->stream && !link_room())
		return BLOCKED;
	if (p->failure.code) {
		if (p->stream)
			result_error(p->stream->id, (enum code)p->failure.code, p->failure.err, p->failure.step);
		proc_discard(p);
		return IDLE;
	}
	if (p->stream && !p->answered)
		send_answer(p);
	input_flush(p);
	return p->stream ? run_attached(p) : run_detached(p);
}

/* --- ends --- */

/* Exits nobody has heard of are kept for a later attach, but not without limit. */
static void forget_untold(void)
{
	uint32_t n = 0;

	for (struct proc *p = procs; p; p = p->next)
		if (p->exited && !p->told && !p->stream && ++n > UNTOLD_MAX) {
			p->told = true;
			task_wake(&p->task);
		}
}

static void on_death(struct proc *p, int status)
{
	p->exited = true;
	p->status = status;
	p->deadline = now_ms() + DRAIN_MS;
	deadlines++;
	input_close(p, true);
	task_wake(&p->task);
}

void proc_reap(void)
{
	int status;
	pid_t pid;
	bool untold = false;

	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		if (helper_reaped(pid, status))
			continue;
		for (struct proc *p = procs; p; p = p->next)
			if (p->pid == pid && !p->exited) {
				on_death(p, status);
				untold |= !p->stream;
				break;
			}
	}
	if (untold)
		forget_untold();
}

int proc_timeout(void)
{
	uint64_t now, first = UINT64_MAX;

	if (!deadlines)
		return -1;
	for (struct proc *p = procs; p; p = p->next)
		if (p->deadline && p->deadline < first)
			first = p->deadline;
	now = now_ms();
	return first <= now ? 0 : (int)(first - now);
}

/* Past the deadline, what is in the pipe now is still delivered, and nothing after it. */
void proc_deadlines(void)
{
	uint64_t now;

	if (!deadlines)
		return;
	now = now_ms();
	for (struct proc *p = procs; p; p = p->next) {
		if (!p->deadline || p->deadline > now)
			continue;
		clear_deadline(p);
		for (int i = 0; i < 2; i++) {
			int waiting = 0;

			if (p->out[i].source.fd >= 0)
				ioctl(p->out[i].source.fd, FIONREAD, &waiting);
			p->out[i].left = waiting;
		}
		task_wake(&p->task);
	}
}

/* --- operations on a running process --- */

void op_processes(uint32_t id, struct reader *r)
{
	struct writer w = result_begin();

	(void)r;
	for (struct proc *p = procs; p; p = p->next)
		if (is_running(p))
			put_u32(&w, (uint32_t)p->pid);
	result_end(&w, FLAG_FIN, id);
}

void op_attach(uint32_t id, struct reader *r)
{
	struct proc *p = proc_find(get_u32(r));
	struct stream *s;

	if (!p) {
		result_error(id, C_NOT_FOUND, ESRCH, "process");
		return;
	}
	s = stream_new(id, &proc_stream_ops, p, WINDOW_PROC);
	if (!s) {
		result_error(id, C_LIMIT, ENOMEM, "stream");
		return;
	}
	if (p->stream) {
		frame_send(F_RESET, 0, FLAG_FIN, p->stream->id);
		stream_free(p->stream);
	}
	p->stream = s;
	s->rx_credit = p->queue.bytes < WINDOW_PROC ? WINDOW_PROC - p->queue.bytes : 0;
	for (int i = 0; i < 2; i++)
		p->out[i].ended = false;
	p->input_gone = p->input.fd < 0;
	p->answered = true;
	send_answer(p);
	task_wake(&p->task);
}

void op_signal(uint32_t id, struct reader *r)
{
	struct proc *p = proc_find(get_u32(r));
	int number = (int)get_u32(r);
	bool group = get_u8(r);

	if (r->bad || number < 0 || number > SIGRTMAX) {
		result_error(id, C_INVALID, EINVAL, "signal");
	} else if (!p || (p->exited && !group)) {
		result_error(id, C_NOT_FOUND, ESRCH, "process");
	} else if (group && number == SIGKILL) {
		/* Once it is reaped its number may name another session; the mark never does. */
		tree_kill(p->exited ? 0 : p->pid, p->mark);
		result_ok(id, FLAG_FIN);
	} else if (kill(group ? -p->pid : p->pid, number) < 0) {
		result_errno(id, errno, "signal");
	} else {
		result_ok(id, FLAG_FIN);
	}
}

void op_resize(uint32_t id, struct reader *r)
{
	struct proc *p = proc_find(get_u32(r));
	struct winsize size = {.ws_row = get_u16(r), .ws_col = get_u16(r)};

	if (!p)
		result_error(id, C_NOT_FOUND, ESRCH, "process");
	else if (r->bad || !p->pty || p->out[0].source.fd < 0)
		result_error(id, C_INVALID, ENOTTY, "resize");
	else if (ioctl(p->out[0].source.fd, TIOCSWINSZ, &size) < 0)
		result_errno(id, errno, "resize");
	else
		result_ok(id, FLAG_FIN);
}
