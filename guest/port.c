/* TCP connections to ports of the sandbox's own loopback. */
#include "ops.h"
#include "proc.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

struct port {
	void *grave;
	struct task task;
	struct source source;
	struct stream *stream;
	struct queue queue;
	uint16_t number;
	bool second; /* trying ::1 */
	bool writable, readable, connected;
	bool host_eof, sent_eof, shut;
	int first_error;
};

static void discard(struct port *p)
{
	source_close(&p->source);
	queue_clear(&p->queue);
	task_drop(&p->task);
	bury(p);
}

static void fail(struct port *p, int err, const char *step)
{
	result_errno(p->stream->id, err, step);
	stream_free(p->stream);
	discard(p);
}

static void on_ready(struct source *source, uint32_t events)
{
	struct port *p = CONTAINER(source, struct port, source);

	p->readable |= (events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0;
	p->writable |= (events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0;
	task_wake(&p->task);
}

static int connect_to(struct port *p)
{
	struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(p->number)};
	struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(p->number), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	int one = 1, rc, fd = socket(p->second ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0)
		return errno;
	v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	rc = p->second ? connect(fd, (struct sockaddr *)&v6, sizeof v6) : connect(fd, (struct sockaddr *)&v4, sizeof v4);
	rc = rc < 0 && errno != EINPROGRESS ? errno : -source_open(&p->source, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP, on_ready);
	if (rc)
		close(fd);
	return rc;
}

/* True once connected; false while it waits or after it failed (then P is gone). */
static bool finish_connect(struct port *p)
{
	int err = 0;
	socklen_t len = sizeof err;

	if (p->source.fd >= 0) {
		if (!p->writable)
			return false;
		if (getsockopt(p->source.fd, SOL_SOCKET, SO_ERROR, &err, &len) < 0)
			err = errno;
		if (!err) {
			p->connected = true;
			result_ok(p->stream->id, 0);
			return true;
		}
		source_close(&p->source);
	} else {
		err = p->first_error;
	}
	if (!p->second) {
		p->second = true;
		p->first_error = err;
		p->readable = p->writable = false;
		if (connect_to(p) == 0)
			return false;
	}
	/* Where ::1 does not exist, what 127.0.0.1 said is the answer. */
	fail(p, p->first_error, "connect");
	return false;
}

static bool write_some(struct port *p)
{
	uint32_t written = 0;
	bool fine = p->shut || queue_flush(&p->queue, p->source.fd, &written);

	if (written)
		stream_consumed(p->stream, written);
	if (fine && p->host_eof && !p->queue.head && !p->shut) {
		p->shut = true;
		shutdown(p->source.fd, SHUT_WR);
	}
	return fine;
}

/* 0: nothing now; 1: more; -1: broken (errno). */
static int read_some(struct port *p)
{
	struct stream *s = p->stream;
	size_t want = s->tx_credit[CH_OUT] < PAYLOAD_MAX ? s->tx_credit[CH_OUT] : PAYLOAD_MAX;
	struct writer w;
	ssize_t n;

	if (p->sent_eof || !p->readable || !want)
		return 0;
	w = frame_begin();
	n = read(p->source.fd, w.p, want);
	if (n > 0) {
		w.p += n;
		frame_end(&w, F_DATA, CH_OUT, 0, s->id);
		s->tx_credit[CH_OUT] -= (uint32_t)n;
		return 1;
	}
	if (n == 0) {
		p->sent_eof = true;
		frame_send(F_EOF, CH_OUT, 0, s->id);
		return 0;
	}
	if (errno == EINTR)
		return 1;
	if (errno != EAGAIN)
		return -1;
	p->readable = false;
	return 0;
}

static enum progress run(struct task *task)
{
	struct port *p = CONTAINER(task, struct port, task);
	int more;

	if (!link_room())
		return BLOCKED;
	if (!p->connected && !finish_connect(p))
		return IDLE;
	if (!link_room())
		return BLOCKED;
	more = write_some(p) ? read_some(p) : -1;
	if (more < 0) {
		fail(p, errno, "port");
		return IDLE;
	}
	if (p->sent_eof && p->shut) {
		result_ok(p->stream->id, FLAG_FIN);
		stream_free(p->stream);
		discard(p);
		return IDLE;
	}
	return more ? AGAIN : IDLE;
}

static void on_data(struct stream *s, const uint8_t *data, uint32_t len)
{
	struct port *p = s->impl;

	if (p->host_eof)
		return;
	if (!queue_push(&p->queue, data, len))
		p->host_eof = true;
	task_wake(&p->task);
}

static void on_eof(struct stream *s, uint8_t channel)
{
	struct port *p = s->impl;

	if (channel == CH_IN)
		p->host_eof = true;
	task_wake(&p->task);
}

static void on_credit(struct stream *s) { task_wake(&((struct port *)s->impl)->task); }

static void on_close(struct stream *s) { discard(s->impl); }

static const struct stream_ops ops = {.data = on_data, .eof = on_eof, .credit = on_credit, .close = on_close};

void op_connect(uint32_t id, struct reader *r)
{
	uint16_t number = get_u16(r);
	struct port *p = calloc(1, sizeof *p);

	if (p)
		p->stream = stream_new(id, &ops, p, WINDOW_OTHER);
	if (!p || !p->stream) {
		free(p);
		result_error(id, C_LIMIT, ENOMEM, "stream");
		return;
	}
	p->source.fd = -1;
	p->task.run = run;
	p->number = number;
	queue_init(&p->queue);
	if (r->bad || !number) {
		fail(p, EINVAL, "port");
		return;
	}
	p->first_error = connect_to(p);
	task_wake(&p->task);
}
