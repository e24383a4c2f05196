#include "wire.h"

#include <string.h>

static uint64_t get_int(struct reader *r, size_t size)
{
	uint64_t v = 0;

	if (r->bad || (size_t)(r->end - r->p) < size) {
		r->bad = true;
		return 0;
	}
	for (size_t i = 0; i < size; i++)
		v |= (uint64_t)r->p[i] << (8 * i);
	r->p += size;
	return v;
}

uint8_t get_u8(struct reader *r) { return (uint8_t)get_int(r, 1); }
uint16_t get_u16(struct reader *r) { return (uint16_t)get_int(r, 2); }
uint32_t get_u32(struct reader *r) { return (uint32_t)get_int(r, 4); }
uint64_t get_u64(struct reader *r) { return get_int(r, 8); }

const uint8_t *get_blob(struct reader *r, uint32_t *len)
{
	const uint8_t *data;

	*len = get_u32(r);
	if (r->bad || (size_t)(r->end - r->p) < *len) {
		r->bad = true;
		*len = 0;
		return (const uint8_t *)"";
	}
	data = r->p;
	r->p += *len;
	return data;
}

const char *get_text(struct reader *r)
{
	uint32_t len;
	const uint8_t *data = get_blob(r, &len);

	if (r->bad || r->p == r->end || *r->p != 0 || memchr(data, 0, len)) {
		r->bad = true;
		return "";
	}
	r->p++;
	return (const char *)data;
}

static void put_int(struct writer *w, uint64_t v, size_t size)
{
	if (w->full || (size_t)(w->end - w->p) < size) {
		w->full = true;
		return;
	}
	for (size_t i = 0; i < size; i++)
		*w->p++ = (uint8_t)(v >> (8 * i));
}

void put_u8(struct writer *w, uint8_t v) { put_int(w, v, 1); }
void put_u16(struct writer *w, uint16_t v) { put_int(w, v, 2); }
void put_u32(struct writer *w, uint32_t v) { put_int(w, v, 4); }
void put_u64(struct writer *w, uint64_t v) { put_int(w, v, 8); }

void put_bytes(struct writer *w, const void *data, size_t len)
{
	if (w->full || (size_t)(w->end - w->p) < len) {
		w->full = true;
		return;
	}
	if (len)
		memcpy(w->p, data, len);
	w->p += len;
}

void put_text(struct writer *w, const char *text)
{
	size_t len = strlen(text);

	put_u32(w, (uint32_t)len);
	put_bytes(w, text, len);
}
