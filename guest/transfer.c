/* Reading and writing files, a slice of at most 64 KiB at a time. */
#include "guest.h"
#include "meta.h"
#include "ops.h"
#include "path.h"
#include "users.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

struct transfer {
	void *grave;
	struct task task;
	struct stream *stream;
	int fd;
	uint64_t at, left; /* left: of a read; all ones: to the end */
	bool answered;
};

static void discard(struct transfer *t)
{
	if (t->fd >= 0)
		close(t->fd);
	task_drop(&t->task);
	bury(t);
}

static void on_close(struct stream *s) { discard(s->impl); }

/* Regular files, and the devices that neither block nor do anything (null, zero, full, random). */
static int check_kind(const struct stat *st, bool bounded)
{
	if (S_ISDIR(st->st_mode))
		return EISDIR;
	if (S_ISREG(st->st_mode))
		return 0;
	if (S_ISCHR(st->st_mode) && major(st->st_rdev) == 1) {
		unsigned minor_number = minor(st->st_rdev);

		if (minor_number == 3 || (bounded && (minor_number == 5 || minor_number == 7 || minor_number == 8 || minor_number == 9)))
			return 0;
	}
	return EINVAL;
}

static struct transfer *transfer_new(uint32_t id, int fd, const struct stream_ops *ops)
{
	struct transfer *t = calloc(1, sizeof *t);

	if (t)
		t->stream = stream_new(id, ops, t, WINDOW_FILE);
	if (!t || !t->stream) {
		free(t);
		close(fd);
		result_error(id, C_LIMIT, ENOMEM, "stream");
		return NULL;
	}
	t->fd = fd;
	return t;
}

/* --- read --- */

static void finish_read(struct transfer *t, int err)
{
	uint32_t id = t->stream->id;

	if (err) {
		result_errno(id, err, "read");
	} else {
		frame_send(F_EOF, CH_OUT, 0, id);
		result_ok(id, FLAG_FIN);
	}
	stream_free(t->stream);
	discard(t);
}

static enum progress read_run(struct task *task)
{
	struct transfer *t = CONTAINER(task, struct transfer, task);
	size_t want = PAYLOAD_MAX;
	struct writer w;
	ssize_t n;

	if (!link_room())
		return BLOCKED;
	if (want > t->stream->tx_credit[CH_OUT])
		want = t->stream->tx_credit[CH_OUT];
	if (want > t->left)
		want = (size_t)t->left;
	if (!want && t->left)
		return IDLE;
	w = frame_begin();
	n = want ? pread(t->fd, w.p, want, (off_t)t->at) : 0;
	if (n < 0 && errno == EINTR)
		return AGAIN;
	/* A pseudo file that would block has nothing more to say now. */
	if (n <= 0) {
		finish_read(t, n < 0 && errno != EAGAIN ? errno : 0);
		return IDLE;
	}
	w.p += n;
	frame_end(&w, F_DATA, CH_OUT, 0, t->stream->id);
	t->stream->tx_credit[CH_OUT] -= (uint32_t)n;
	t->at += (uint64_t)n;
	if (t->left != UINT64_MAX)
		t->left -= (uint64_t)n;
	return AGAIN;
}

static void on_read_credit(struct stream *s) { task_wake(&((struct transfer *)s->impl)->task); }

static const struct stream_ops read_ops = {.credit = on_read_credit, .close = on_close};

void op_read(uint32_t id, struct reader *r)
{
	const char *path = get_text(r);
	uint64_t offset = get_u64(r), length = get_u64(r);
	struct transfer *t;
	struct stat st;
	struct writer w;
	int fd, rc = r->bad || offset > INT64_MAX ? EINVAL : path_check(path);

	fd = rc ? -1 : open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (fd < 0) {
		result_errno(id, rc ? rc : errno, "open");
		return;
	}
	rc = fstat(fd, &st) < 0 ? errno : check_kind(&st, length != UINT64_MAX);
	if (rc) {
		close(fd);
		result_errno(id, rc, "open");
		return;
	}
	t = transfer_new(id, fd, &read_ops);
	if (!t)
		return;
	t->task.run = read_run;
	t->at = offset;
	t->left = length;
	w = result_begin();
	put_u64(&w, (uint64_t)st.st_size);
	result_end(&w, 0, id);
	task_wake(&t->task);
}

/* --- write --- */

static void fail_write(struct transfer *t, int err)
{
	result_errno(t->stream->id, err, "write");
	stream_free(t->stream);
	discard(t);
}

static void on_data(struct stream *s, const uint8_t *data, uint32_t len)
{
	struct transfer *t = s->impl;

	if (!guest_has_room(t->fd, len)) {
		fail_write(t, ENOMEM);
		return;
	}
	for (uint32_t at = 0; at < len;) {
		ssize_t n = write(t->fd, data + at, len - at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			fail_write(t, n < 0 ? errno : ENOSPC);
			return;
		}
		at += (uint32_t)n;
		t->at += (uint64_t)n;
	}
	stream_consumed(s, len);
}

static void on_eof(struct stream *s, uint8_t channel)
{
	struct transfer *t = s->impl;
	int rc, fd = t->fd;
	struct writer w;

	if (channel != CH_IN)
		return;
	t->fd = -1;
	rc = close(fd) < 0 ? errno : 0;
	if (rc) {
		fail_write(t, rc);
		return;
	}
	w = result_begin();
	put_u64(&w, t->at);
	result_end(&w, FLAG_FIN, s->id);
	stream_free(s);
	discard(t);
}

static void on_write_credit(struct stream *s) { (void)s; }

static const struct stream_ops write_ops = {.data = on_data, .eof = on_eof, .credit = on_write_credit, .close = on_close};

/* Open for writing; a file that is new belongs to OWNER. What was there loses its metadata to what META
 * has. -errno on failure. */
static int open_target(const struct place *place, const struct owner *owner, mode_t mode, struct reader meta)
{
	const int flags = O_WRONLY | O_TRUNC | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
	bool made = true;
	struct stat st;
	int fd = openat(place->dir, place->name, flags | O_CREAT | O_EXCL, mode), rc = 0;

	if (fd < 0 && errno == EEXIST) {
		fd = openat(place->dir, place->name, flags);
		made = fd < 0 && errno == ENOENT; /* a link to nothing: make what it names */
		if (made)
			fd = openat(place->dir, place->name, flags | O_CREAT, mode);
	}
	if (fd < 0)
		return -errno;
	if (fstat(fd, &st) < 0)
		rc = errno;
	else if (made && fchown(fd, owner->uid, owner->gid) < 0)
		rc = errno;
	else
		rc = check_kind(&st, true);
	/* A change of owner clears the set-id bits. */
	if (!rc && made && mode & 06000 && fchmod(fd, mode) < 0)
		rc = errno;
	if (!rc && S_ISREG(st.st_mode) && (!made || meta.p < meta.end))
		rc = meta_replace(fd, meta);
	if (rc)
		close(fd);
	return rc ? -rc : fd;
}

static void start_write(uint32_t id, struct reader *r, bool with_meta)
{
	const char *path = get_text(r), *name = get_text(r);
	mode_t mode = (mode_t)get_u32(r) & 07777;
	struct reader meta = {.p = r->end, .end = r->end};
	struct user user;
	struct owner owner;
	struct place place;
	struct transfer *t;
	int fd, rc = r->bad ? EINVAL : path_check(path);

	if (!rc && with_meta) {
		meta = *r;
		rc = meta_check(r);
	}
	if (!rc && user_find(name, &user) < 0) {
		result_error(id, C_NO_USER, 0, "user");
		return;
	}
	if (!rc) {
		owner = (struct owner){user.uid, user.gid};
		rc = path[strlen(path) - 1] == '/' ? EISDIR : path_place(path, &owner, &place);
	}
	if (rc) {
		result_errno(id, rc, "open");
		return;
	}
	fd = open_target(&place, &owner, mode, meta);
	close(place.dir);
	if (fd == -ENOTSUP) {
		result_error(id, C_INVALID, ENOTSUP, "metadata");
		return;
	}
	if (fd < 0) {
		result_errno(id, -fd, "open");
		return;
	}
	t = transfer_new(id, fd, &write_ops);
	if (t)
		result_ok(id, 0);
}

void op_write(uint32_t id, struct reader *r) { start_write(id, r, false); }

void op_store(uint32_t id, struct reader *r) { start_write(id, r, true); }
