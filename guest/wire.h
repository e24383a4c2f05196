/* Reading and writing the fields of a payload. */
#ifndef SANDYARD_WIRE_H
#define SANDYARD_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A cursor over hostile bytes: after any short or malformed field `bad` stays set and every
 * further field reads as zero or "". */
struct reader {
	const uint8_t *p, *end;
	bool bad;
};

uint8_t get_u8(struct reader *r);
uint16_t get_u16(struct reader *r);
uint32_t get_u32(struct reader *r);
uint64_t get_u64(struct reader *r);
/* A NUL-terminated string inside the payload itself; lives as long as the payload. */
const char *get_text(struct reader *r);
const uint8_t *get_blob(struct reader *r, uint32_t *len);

/* A cursor over a buffer of ours. What does not fit is left out whole and sets `full`. */
struct writer {
	uint8_t *start, *p, *end;
	bool full;
};

void put_u8(struct writer *w, uint8_t v);
void put_u16(struct writer *w, uint16_t v);
void put_u32(struct writer *w, uint32_t v);
void put_u64(struct writer *w, uint64_t v);
void put_bytes(struct writer *w, const void *data, size_t len);
void put_text(struct writer *w, const char *text);

#endif
