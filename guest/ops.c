#include "ops.h"

#include "guest.h"
#include "proc.h"
#include "users.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

static void op_ping(uint32_t id, struct reader *r)
{
	struct writer w = result_begin();

	(void)r;
	put_text(&w, AGENT_VERSION);
	put_text(&w, boot_id);
	put_u32(&w, (uint32_t)getpid());
	put_u32(&w, stream_count());
	put_u32(&w, proc_count());
	put_u64(&w, proc_dropped());
	result_end(&w, FLAG_FIN, id);
}

static void op_user(uint32_t id, struct reader *r)
{
	struct user user;
	struct writer w;

	if (user_find(get_text(r), &user) < 0) {
		result_error(id, C_NO_USER, 0, "user");
		return;
	}
	w = result_begin();
	put_text(&w, user.name);
	put_u32(&w, user.uid);
	put_u32(&w, user.gid);
	put_text(&w, user.home);
	put_text(&w, user.shell);
	result_end(&w, FLAG_FIN, id);
}

static int set_seed(const uint8_t *seed, uint32_t len)
{
	enum { SEED_MAX = 512 };
	_Alignas(struct rand_pool_info) uint8_t buf[sizeof(struct rand_pool_info) + SEED_MAX];
	struct rand_pool_info *pool = (struct rand_pool_info *)(void *)buf;
	int fd, rc;

	if (len > SEED_MAX)
		len = SEED_MAX;
	pool->entropy_count = (int)len * 8;
	pool->buf_size = (int)len;
	memcpy(buf + sizeof *pool, seed, len);
	fd = open("/dev/urandom", O_RDWR | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		return errno;
	rc = ioctl(fd, RNDADDENTROPY, pool) < 0 ? errno : 0;
	/* What was mixed in counts at once: else a copy goes on with the randomness of the one it was made from. */
	if (!rc && ioctl(fd, RNDRESEEDCRNG) < 0 && errno != ENODATA)
		rc = errno;
	/* Without the right to credit entropy the seed can still be mixed in. */
	if (rc && write(fd, seed, len) == (ssize_t)len)
		rc = 0;
	close(fd);
	return rc;
}

static int set_clock(uint64_t ns)
{
	struct timespec ts = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};

	return clock_settime(CLOCK_REALTIME, &ts) < 0 ? errno : 0;
}

static void op_identify(uint32_t id, struct reader *r)
{
	const char *hostname = get_text(r);
	uint64_t ns = get_u64(r);
	uint32_t len;
	const uint8_t *seed = get_blob(r, &len);
	struct writer w;

	if (r->bad) {
		result_error(id, C_INVALID, EINVAL, "request");
		return;
	}
	w = result_begin();
	put_u32(&w, *hostname && sethostname(hostname, strlen(hostname)) < 0 ? (uint32_t)errno : 0);
	put_u32(&w, ns ? (uint32_t)set_clock(ns) : 0);
	put_u32(&w, len ? (uint32_t)set_seed(seed, len) : 0);
	result_end(&w, FLAG_FIN, id);
}

static void op_freeze(uint32_t id, struct reader *r)
{
	uint8_t still = get_u8(r);
	int err = r->bad ? EINVAL : guest_freeze(still & FREEZE_DISK, still & FREEZE_PROCESSES);

	if (err)
		result_errno(id, err, "freeze");
	else
		result_ok(id, FLAG_FIN);
}

static void op_use(uint32_t id, struct reader *r)
{
	struct writer w = result_begin();
	struct guest_use use;

	(void)r;
	guest_use(&use);
	put_u64(&w, use.disk);
	put_u64(&w, use.memory);
	put_u64(&w, use.cache);
	put_u64(&w, use.pids);
	put_u64(&w, use.oom_kills);
	result_end(&w, FLAG_FIN, id);
}

static void op_configure(uint32_t id, struct reader *r)
{
	uint32_t len;
	const char *records = (const char *)get_blob(r, &len);
	const char *failed = "records";
	int err = EINVAL;

	/* The last record is an empty one: nothing is read beyond it. */
	if (!r->bad && len >= 2 && records[len - 1] == 0 && records[len - 2] == 0)
		err = guest_configure(records, &failed);
	if (err)
		result_errno(id, err, failed);
	else
		result_ok(id, FLAG_FIN);
}

static op_fn *const table[OP_COUNT] = {
    [OP_PING] = op_ping,       [OP_SPAWN] = op_spawn,   [OP_PROCESSES] = op_processes, [OP_ATTACH] = op_attach,
    [OP_SIGNAL] = op_signal,   [OP_RESIZE] = op_resize, [OP_USER] = op_user,           [OP_STAT] = op_stat,
    [OP_LIST] = op_list,       [OP_MKDIR] = op_mkdir,   [OP_MOVE] = op_move,           [OP_REMOVE] = op_remove,
    [OP_READ] = op_read,       [OP_WRITE] = op_write,   [OP_CONNECT] = op_connect,     [OP_WATCH] = op_watch,
    [OP_IDENTIFY] = op_identify, [OP_STORE] = op_store,   [OP_FREEZE] = op_freeze,
    [OP_USE] = op_use,         [OP_CONFIGURE] = op_configure,
};

void op_dispatch(uint8_t op, uint32_t id, struct reader *r)
{
	if (op < OP_COUNT && table[op])
		table[op](id, r);
	else
		result_error(id, C_INVALID, ENOSYS, "unknown operation");
}
