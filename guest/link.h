/* The link to the host: frames, streams, credit. */
#ifndef SANDYARD_LINK_H
#define SANDYARD_LINK_H

#include "loop.h"
#include "proto.h"
#include "wire.h"

struct stream;

/* What a kind of stream does with frames from the host. `data` and `eof` may be NULL: a protocol error. */
struct stream_ops {
	void (*data)(struct stream *stream, const uint8_t *data, uint32_t len);
	void (*eof)(struct stream *stream, uint8_t channel);
	void (*credit)(struct stream *stream);
	/* The stream is going (reset, link gone): forget it, send nothing. */
	void (*close)(struct stream *stream);
};

struct stream {
	void *grave;
	struct stream *next; /* in its hash bucket */
	uint32_t id;
	uint32_t tx_credit[CHANNELS]; /* what the host allows us to send */
	uint32_t rx_credit;           /* what we allowed the host to send on channel 0 */
	uint32_t rx_done;             /* consumed, not given back yet */
	uint32_t window;
	const struct stream_ops *ops;
	void *impl;
};

extern char boot_id[33];

void link_listen(int fd);
void link_connect(int fd);
/* Once a round: send what is queued, drop a broken link. */
void link_round(void);

/* NULL when memory is short. */
struct stream *stream_new(uint32_t id, const struct stream_ops *ops, void *impl, uint32_t window);
void stream_free(struct stream *stream);
uint32_t stream_count(void);
/* Count LEN bytes from the host as consumed; gives credit back in large steps. */
void stream_consumed(struct stream *stream, uint32_t len);

/* Whether one more frame of any size, and some small ones, can be queued. Every task that sends
 * asks first and returns BLOCKED if not. */
bool link_room(void);
/* The same, and the whole of one more frame besides. */
bool link_room_twice(void);
/* Where the payload of the next frame goes; at most PAYLOAD_MAX bytes. */
struct writer frame_begin(void);
void frame_end(struct writer *w, enum frame type, uint8_t channel, uint16_t flags, uint32_t id);
void frame_send(enum frame type, uint8_t channel, uint16_t flags, uint32_t id);

/* RESULT: begin, put fields, end. */
struct writer result_begin(void);
void result_end(struct writer *w, uint16_t flags, uint32_t id);
void result_ok(uint32_t id, uint16_t flags);
void result_error(uint32_t id, enum code code, int err, const char *step);
void result_errno(uint32_t id, int err, const char *step);
enum code code_of(int err);

#endif
