#include "users.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_LIMIT = 8 << 20, FIELDS = 7 };

/* A line reader over a file the sandbox wrote: bounded, never blocking, too long lines are skipped. */
struct lines {
	int fd;
	size_t start, end, total;
	char buf[32768];
};

static bool lines_open(struct lines *l, const char *path)
{
	struct stat st;

	l->start = l->end = l->total = 0;
	l->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (l->fd >= 0 && (fstat(l->fd, &st) < 0 || !S_ISREG(st.st_mode))) {
		close(l->fd);
		l->fd = -1;
	}
	return l->fd >= 0;
}

static void lines_close(struct lines *l)
{
	if (l->fd >= 0)
		close(l->fd);
	l->fd = -1;
}

static bool lines_fill(struct lines *l)
{
	ssize_t n;

	memmove(l->buf, l->buf + l->start, l->end - l->start);
	l->end -= l->start;
	l->start = 0;
	if (l->end == sizeof l->buf)
		l->end = 0; /* too long a line: its head is dropped, and its tail parses as no user of ours */
	n = l->total < FILE_LIMIT ? read(l->fd, l->buf + l->end, sizeof l->buf - l->end) : 0;
	if (n <= 0)
		return false;
	l->end += (size_t)n;
	l->total += (size_t)n;
	return true;
}

static char *lines_next(struct lines *l)
{
	for (;;) {
		char *line = l->buf + l->start;
		char *stop = memchr(line, '\n', l->end - l->start);

		if (stop) {
			*stop = 0;
			l->start = (size_t)(stop + 1 - l->buf);
			return line;
		}
		if (lines_fill(l))
			continue;
		if (l->start == l->end || l->end == sizeof l->buf)
			return NULL;
		l->buf[l->end] = 0; /* a last line without a newline */
		line = l->buf + l->start;
		l->start = l->end;
		return line;
	}
}

static int split(char *line, char *fields[FIELDS])
{
	int n = 0;

	while (n < FIELDS && line) {
		fields[n++] = line;
		line = strchr(line, ':');
		if (line)
			*line++ = 0;
	}
	return n;
}

static bool number(const char *text, uint32_t *value)
{
	uint64_t v = 0;

	if (!*text)
		return false;
	for (; *text; text++) {
		if (*text < '0' || *text > '9' || v > UINT32_MAX)
			return false;
		v = v * 10 + (uint64_t)(*text - '0');
	}
	*value = (uint32_t)v;
	/* The largest value means "no change" to the kernel. */
	return v < UINT32_MAX;
}

static void set(char *out, size_t size, const char *text) { snprintf(out, size, "%s", text); }

/* First entry of FILE whose name is NAME, or whose id is ID if NAME is NULL. */
static bool find(struct lines *l, const char *file, const char *name, uint32_t id, char *fields[FIELDS], int least)
{
	char *line;

	if (!lines_open(l, file))
		return false;
	while ((line = lines_next(l))) {
		uint32_t found;

		if (split(line, fields) < least || !*fields[0] || !number(fields[2], &found))
			continue;
		if (name ? strcmp(fields[0], name) == 0 : found == id) {
			lines_close(l);
			return true;
		}
	}
	lines_close(l);
	return false;
}

static int find_group(const char *spec, uint32_t *gid)
{
	struct lines l;
	char *fields[FIELDS];

	if (find(&l, "/etc/group", spec, 0, fields, 3) && number(fields[2], gid))
		return 0;
	return number(spec, gid) ? 0 : -1;
}

int user_find(const char *spec, struct user *user)
{
	struct lines l;
	char *fields[FIELDS], name[256];
	const char *colon = strchr(spec, ':');
	size_t len = colon ? (size_t)(colon - spec) : strlen(spec);
	uint32_t uid = 0;
	bool numeric;

	if (len >= sizeof name)
		return -1;
	memcpy(name, spec, len);
	name[len] = 0;
	memset(user, 0, sizeof *user);
	numeric = !len || number(name, &uid);
	if (find(&l, "/etc/passwd", numeric ? NULL : name, uid, fields, 7)) {
		set(user->name, sizeof user->name, fields[0]);
		set(user->home, sizeof user->home, *fields[5] ? fields[5] : "/");
		set(user->shell, sizeof user->shell, *fields[6] ? fields[6] : "/bin/sh");
		if (!number(fields[2], &user->uid) || !number(fields[3], &user->gid))
			return -1;
	} else if (numeric || strcmp(name, "root") == 0) { /* in an image without such a file, too */
		user->uid = uid;
		set(user->name, sizeof user->name, uid ? name : "root");
		set(user->home, sizeof user->home, uid ? "/" : "/root");
		set(user->shell, sizeof user->shell, "/bin/sh");
	} else {
		return -1;
	}
	if (!colon)
		return 0;
	user->group_given = true;
	return find_group(colon + 1, &user->gid);
}

static bool is_member(char *members, const char *name)
{
	for (char *next; members; members = next) {
		next = strchr(members, ',');
		if (next)
			*next++ = 0;
		if (strcmp(members, name) == 0)
			return true;
	}
	return false;
}

int user_groups(const struct user *user, gid_t groups[GROUPS_MAX])
{
	struct lines l;
	char *line, *fields[FIELDS];
	int n = 0;
	uint32_t gid;

	groups[n++] = user->gid;
	if (user->group_given || !lines_open(&l, "/etc/group"))
		return n;
	while (n < GROUPS_MAX && (line = lines_next(&l)))
		if (split(line, fields) >= 4 && number(fields[2], &gid) && gid != user->gid && is_member(fields[3], user->name))
			groups[n++] = gid;
	lines_close(&l);
	return n;
}

void user_name(uint32_t uid, char *out, size_t size)
{
	struct lines l;
	char *fields[FIELDS];

	if (find(&l, "/etc/passwd", NULL, uid, fields, 4))
		set(out, size, fields[0]);
	else
		snprintf(out, size, "%u", uid);
}

void group_name(uint32_t gid, char *out, size_t size)
{
	struct lines l;
	char *fields[FIELDS];

	if (find(&l, "/etc/group", NULL, gid, fields, 3))
		set(out, size, fields[0]);
	else
		snprintf(out, size, "%u", gid);
}
