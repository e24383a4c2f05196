#include "link.h"

#include "ops.h"
#include "watch.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
	IN_CAP = 2 * (PAYLOAD_MAX + HEADER_SIZE),
	OUT_CAP = 5 * PAYLOAD_MAX + 128 * HEADER_SIZE,
	SMALL = 16384, /* what commands and their output need at most, as a rule */
	ROOM = PAYLOAD_MAX + 64 * HEADER_SIZE, /* for one frame and the small ones that go with it */
	BUCKETS = 1024,
	FRESH_MS = 1000,
	TOLD_LATE_MS = 100,
};

char boot_id[33];

static struct {
	struct source listener, io;
	struct task task;
	bool permanent; /* a port that cannot be accepted again */
	bool readable, broken, greeted, deaf;
	uint64_t greeted_at; /* ms */
	size_t in_len, out_head, out_tail;
	bool swollen; /* the buffers hold more memory than an idle agent should */
	uint8_t *request; /* an OPEN in parts */
	uint32_t request_len, request_id;
	uint8_t request_op;
	bool request_refused;
} lk = {.listener.fd = -1, .io.fd = -1};

/* Apart from `lk`, so that their pages can be given back. */
static _Alignas(4096) uint8_t in[IN_CAP], out[OUT_CAP];

static struct stream *buckets[BUCKETS];
static uint32_t streams;

/* --- streams --- */

static struct stream **stream_slot(uint32_t id)
{
	struct stream **slot = &buckets[id % BUCKETS];

	while (*slot && (*slot)->id != id)
		slot = &(*slot)->next;
	return slot;
}

struct stream *stream_new(uint32_t id, const struct stream_ops *ops, void *impl, uint32_t window)
{
	struct stream *s = calloc(1, sizeof *s);
	struct stream **slot = stream_slot(id);

	if (!s)
		return NULL;
	s->id = id;
	s->ops = ops;
	s->impl = impl;
	s->window = s->rx_credit = s->tx_credit[CH_OUT] = s->tx_credit[CH_ERR] = window;
	*slot = s;
	streams++;
	return s;
}

void stream_free(struct stream *s)
{
	struct stream **slot = stream_slot(s->id);

	*slot = s->next;
	streams--;
	bury(s);
}

uint32_t stream_count(void) { return streams; }

void stream_consumed(struct stream *s, uint32_t len)
{
	struct writer w;

	s->rx_done += len;
	if (s->rx_done < s->window / 4)
		return;
	w = frame_begin();
	put_u32(&w, s->rx_done);
	frame_end(&w, F_CREDIT, CH_IN, 0, s->id);
	s->rx_credit += s->rx_done;
	s->rx_done = 0;
}

static void close_streams(void)
{
	for (size_t i = 0; i < BUCKETS; i++)
		while (buckets[i]) {
			struct stream *s = buckets[i];

			s->ops->close(s);
			stream_free(s);
		}
}

/* --- sending --- */

static size_t out_free(void) { return OUT_CAP - (lk.out_tail - lk.out_head); }
bool link_room(void) { return out_free() >= ROOM; }
bool link_room_twice(void) { return out_free() >= 2 * ROOM; }

struct writer frame_begin(void)
{
	uint8_t *start;

	if (OUT_CAP - lk.out_tail < ROOM) {
		memmove(out, out + lk.out_head, lk.out_tail - lk.out_head);
		lk.out_tail -= lk.out_head;
		lk.out_head = 0;
	}
	start = out + lk.out_tail + HEADER_SIZE;
	return (struct writer){.start = start, .p = start, .end = start + PAYLOAD_MAX};
}

void frame_end(struct writer *w, enum frame type, uint8_t channel, uint16_t flags, uint32_t id)
{
	size_t len = (size_t)(w->p - w->start);
	struct writer header = {.p = w->start - HEADER_SIZE, .end = w->start};

	if (lk.io.fd < 0 || lk.broken)
		return;
	put_u32(&header, (uint32_t)len);
	put_u8(&header, (uint8_t)type);
	put_u8(&header, channel);
	put_u16(&header, flags);
	put_u32(&header, id);
	lk.out_tail += HEADER_SIZE + len;
	lk.swollen |= lk.out_tail > SMALL;
}

void frame_send(enum frame type, uint8_t channel, uint16_t flags, uint32_t id)
{
	struct writer w = frame_begin();

	frame_end(&w, type, channel, flags, id);
}

struct writer result_begin(void)
{
	struct writer w;

	watches_flush();
	w = frame_begin();
	put_u16(&w, C_OK);
	return w;
}

void result_end(struct writer *w, uint16_t flags, uint32_t id) { frame_end(w, F_RESULT, 0, flags, id); }

void result_ok(uint32_t id, uint16_t flags)
{
	struct writer w = result_begin();

	result_end(&w, flags, id);
}

void result_error(uint32_t id, enum code code, int err, const char *step)
{
	struct writer w;

	watches_flush();
	w = frame_begin();
	put_u16(&w, (uint16_t)code);
	put_u32(&w, (uint32_t)err);
	put_text(&w, step);
	result_end(&w, FLAG_FIN, id);
}

void result_errno(uint32_t id, int err, const char *step) { result_error(id, code_of(err), err, step); }

enum code code_of(int err)
{
	switch (err) {
	case 0: return C_OK;
	case ENOENT: case ESRCH: return C_NOT_FOUND;
	case EEXIST: case ENOTEMPTY: return C_EXISTS;
	case EISDIR: return C_IS_DIRECTORY;
	case ENOTDIR: return C_NOT_DIRECTORY;
	case EACCES: case EPERM: case EROFS: return C_PERMISSION;
	case ENOSPC: case EDQUOT: return C_NO_SPACE;
	case ECONNREFUSED: return C_REFUSED;
	case E2BIG: case ENAMETOOLONG: case EFBIG: case EOVERFLOW: return C_TOO_BIG;
	case EINVAL: case ELOOP: case ENXIO: case ENOEXEC: case ENOTTY: case ESPIPE: return C_INVALID;
	case EAGAIN: case EMFILE: case ENFILE: case ENOMEM: return C_LIMIT;
	default: return C_IO;
	}
}

static void flush(void)
{
	while (lk.out_head < lk.out_tail && lk.io.fd >= 0 && !lk.broken) {
		ssize_t n = write(lk.io.fd, out + lk.out_head, lk.out_tail - lk.out_head);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			break;
		if (n <= 0) {
			lk.broken = true;
			break;
		}
		lk.out_head += (size_t)n;
	}
	if (lk.out_head == lk.out_tail)
		lk.out_head = lk.out_tail = 0;
	if (link_room())
		tasks_unblock();
}

/* --- receiving --- */

/* A permanent port that carried nonsense stays open, deaf until the other side hangs up. */
static void protocol_error(void)
{
	lk.broken = true;
	lk.deaf = lk.permanent;
}

static void request_forget(void)
{
	free(lk.request);
	lk.request = NULL;
	lk.request_len = lk.request_id = 0;
	lk.request_refused = false;
}

static void on_hello(struct reader *r)
{
	struct writer w;
	bool known = r->end - r->p >= 6 && memcmp(r->p, "SYAG", 4) == 0;

	close_streams();
	request_forget();
	if (lk.permanent) /* what is left of an earlier session is not for this one */
		lk.out_head = lk.out_tail = 0;
	lk.greeted_at = now_ms();
	if (!known) {
		protocol_error();
		return;
	}
	r->p += 4;
	w = frame_begin();
	put_bytes(&w, "SYAG", 4);
	put_u16(&w, PROTO_VERSION);
	put_text(&w, boot_id);
	put_u32(&w, (uint32_t)getpid());
	frame_end(&w, F_HELLO, 0, 0, 0);
	/* The answer goes out even to another version, so that the host can name it. */
	lk.greeted = get_u16(r) == PROTO_VERSION;
}

static void request_part(struct reader *r)
{
	size_t len = (size_t)(r->end - r->p);
	uint8_t *grown = NULL;

	if (!lk.request_refused && lk.request_len + len <= REQUEST_MAX)
		grown = realloc(lk.request, lk.request_len + len + 1);
	if (!grown) {
		lk.request_refused = true;
		return;
	}
	memcpy(grown + lk.request_len, r->p, len);
	lk.request = grown;
	lk.request_len += (uint32_t)len;
}

static void on_open(uint8_t op, uint16_t flags, uint32_t id, struct reader *r)
{
	if (lk.request_id ? lk.request_id != id || lk.request_op != op : id == 0 || *stream_slot(id)) {
		protocol_error();
		return;
	}
	if (flags & FLAG_MORE || lk.request_id) {
		lk.request_id = id;
		lk.request_op = op;
		request_part(r);
	}
	if (flags & FLAG_MORE)
		return;
	if (lk.request_refused)
		result_error(id, C_TOO_BIG, E2BIG, "request");
	else if (streams >= STREAMS_MAX)
		result_error(id, C_LIMIT, EAGAIN, "streams");
	else if (lk.request_id)
		op_dispatch(op, id, &(struct reader){.p = lk.request, .end = lk.request + lk.request_len});
	else
		op_dispatch(op, id, r);
	request_forget();
}

static void on_data(struct stream *s, uint8_t channel, struct reader *r)
{
	uint32_t len = (uint32_t)(r->end - r->p);

	if (channel != CH_IN || len > s->rx_credit || !s->ops->data) {
		protocol_error();
		return;
	}
	s->rx_credit -= len;
	s->ops->data(s, r->p, len);
}

static void on_credit(struct stream *s, uint8_t channel, struct reader *r)
{
	uint32_t more = get_u32(r);

	if (r->bad || channel == CH_IN || more > CREDIT_MAX || s->tx_credit[channel] > CREDIT_MAX - more) {
		protocol_error();
		return;
	}
	s->tx_credit[channel] += more;
	s->ops->credit(s);
}

static void on_stream_frame(uint8_t type, uint8_t channel, struct stream *s, struct reader *r)
{
	if (type == F_DATA) {
		on_data(s, channel, r);
	} else if (type == F_CREDIT) {
		on_credit(s, channel, r);
	} else if (type == F_EOF && s->ops->eof) {
		s->ops->eof(s, channel);
	} else if (type == F_RESET) {
		s->ops->close(s);
		frame_send(F_RESET, 0, FLAG_FIN, s->id);
		stream_free(s);
	} else {
		protocol_error();
	}
}

static void on_frame(uint8_t type, uint8_t channel, uint16_t flags, uint32_t id, struct reader *r)
{
	if (type == F_HELLO) {
		on_hello(r);
	} else if (!lk.greeted || (lk.request_id && type != F_OPEN)) {
		protocol_error();
	} else if (type == F_OPEN) {
		on_open(channel, flags, id, r);
	} else if (channel >= CHANNELS || type < F_OPEN || type > F_RESET) {
		protocol_error();
	} else {
		struct stream *s = *stream_slot(id);

		if (s)
			on_stream_frame(type, channel, s, r);
	}
}

/* Handle the whole frames at hand; false if it stopped because there is no room to answer. */
static bool parse(void)
{
	size_t at = 0;
	bool room = true;

	while (!lk.broken && lk.in_len - at >= HEADER_SIZE) {
		struct reader header = {.p = in + at, .end = in + at + HEADER_SIZE};
		uint32_t len = get_u32(&header);
		uint8_t type = get_u8(&header), channel = get_u8(&header);
		uint16_t flags = get_u16(&header);
		uint32_t id = get_u32(&header);

		if (len > PAYLOAD_MAX) {
			protocol_error();
			break;
		}
		if (lk.in_len - at < HEADER_SIZE + len)
			break;
		room = link_room();
		if (!room)
			break;
		on_frame(type, channel, flags, id, &(struct reader){.p = header.p, .end = header.p + len});
		at += HEADER_SIZE + len;
	}
	lk.in_len -= at;
	memmove(in, in + at, lk.in_len);
	return room;
}

/* A port tells of its other side, and brings what that sends, in no order: soon after a greeting, an end may be
 * that of the session before, told late. Then the other side is there in a moment, if not already. */
static bool ended_before(void)
{
	struct pollfd port = {.fd = lk.io.fd};

	if (!lk.permanent || !lk.greeted || now_ms() > lk.greeted_at + FRESH_MS)
		return false;
	for (int i = 0; i < TOLD_LATE_MS; i++) {
		if (poll(&port, 1, 0) >= 0 && !(port.revents & POLLHUP))
			return true;
		usleep(1000);
	}
	return false;
}

static enum progress link_run(struct task *task)
{
	(void)task;
	for (int i = 0; i < 8; i++) {
		ssize_t n;

		if (lk.deaf)
			lk.in_len = 0;
		if (!parse())
			return BLOCKED;
		if (lk.broken || !lk.readable || lk.io.fd < 0)
			return IDLE;
		n = read(lk.io.fd, in + lk.in_len, IN_CAP - lk.in_len);
		if (n > 0) {
			lk.in_len += (size_t)n;
			lk.swollen |= lk.in_len > SMALL;
		} else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
			lk.readable = errno == EINTR;
		} else if (!ended_before()) {
			lk.readable = false;
			lk.broken = true;
			lk.deaf = false;
		}
	}
	return AGAIN;
}

static void on_io(struct source *source, uint32_t events)
{
	(void)source;
	if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
		lk.readable = true;
		task_wake(&lk.task);
	}
	/* Writing is tried every round. */
}

static void drop_link(void)
{
	close_streams();
	request_forget();
	if (!lk.permanent)
		source_close(&lk.io);
	lk.in_len = lk.out_head = lk.out_tail = 0;
	lk.broken = lk.greeted = false;
	tasks_unblock();
	if (lk.io.fd >= 0 && lk.readable)
		task_wake(&lk.task);
}

/* After a transfer nothing of it stays resident. */
static void slim(void)
{
	lk.swollen = false;
	madvise(in, sizeof in, MADV_DONTNEED);
	madvise(out, sizeof out, MADV_DONTNEED);
}

void link_round(void)
{
	if (lk.out_head < lk.out_tail)
		flush();
	if (lk.broken)
		drop_link();
	if (lk.swollen && !streams && !lk.in_len && lk.out_head == lk.out_tail)
		slim();
}

static void on_accept(struct source *source, uint32_t events)
{
	int fd;

	(void)events;
	while ((fd = accept4(source->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
		lk.permanent = false;
		drop_link();
		lk.readable = false;
		if (source_open(&lk.io, fd, EPOLLIN | EPOLLOUT, on_io) < 0)
			close(fd);
	}
}

void link_listen(int fd)
{
	lk.task.run = link_run;
	if (source_open(&lk.listener, fd, EPOLLIN, on_accept) < 0)
		_exit(2);
}

void link_connect(int fd)
{
	lk.task.run = link_run;
	if (source_open(&lk.io, fd, EPOLLIN | EPOLLOUT, on_io) < 0)
		_exit(2);
	lk.permanent = true;
}
