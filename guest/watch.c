#include "watch.h"

#include "ops.h"
#include "path.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NODES_MAX = 8192, PENDING = 65536, MASK = IN_CREATE | IN_MODIFY | IN_DELETE | IN_MOVE | IN_ATTRIB };

/* A watched directory; `name` is its path below the root, "" for the root itself. */
struct node {
	struct node *next;
	int wd;
	char name[];
};

struct watch {
	void *grave;
	struct watch *next;
	struct task task;
	struct source source;
	struct stream *stream;
	struct node *nodes;
	int count;
	bool readable, recursive, overflow, ended;
	size_t used;
	uint8_t pending[PENDING];
	char root[PATH_MAX];
};

static struct watch *watches;

static void drop_node(struct watch *w, struct node **at)
{
	struct node *node = *at;

	*at = node->next;
	w->count--;
	free(node);
}

static void discard(struct watch *w)
{
	for (struct watch **at = &watches; *at; at = &(*at)->next)
		if (*at == w) {
			*at = w->next;
			break;
		}
	while (w->nodes)
		drop_node(w, &w->nodes);
	source_close(&w->source);
	task_drop(&w->task);
	bury(w);
}

static void add_event(struct watch *w, uint8_t event, const char *name)
{
	struct writer to = {.start = w->pending, .p = w->pending + w->used, .end = w->pending + PENDING};

	put_u8(&to, event);
	put_text(&to, name);
	if (to.full)
		w->overflow = true;
	else
		w->used = (size_t)(to.p - to.start);
}

/* The path of NAME (may be "") below DIR (may be ""); false if it is too long to be named. */
static bool join(char out[PATH_MAX], const char *dir, const char *name)
{
	return snprintf(out, PATH_MAX, "%s%s%s", dir, *dir && *name ? "/" : "", name) < PATH_MAX;
}

static int add_node(struct watch *w, const char *name)
{
	char path[PATH_MAX];
	struct node *node;
	int wd;

	if (w->count >= NODES_MAX)
		return ENOSPC;
	if (!join(path, w->root, name))
		return 0;
	wd = inotify_add_watch(w->source.fd, path, MASK | IN_ONLYDIR | (*name ? IN_DONT_FOLLOW : IN_DELETE_SELF | IN_MOVE_SELF));
	if (wd < 0)
		return errno;
	for (node = w->nodes; node; node = node->next)
		if (node->wd == wd)
			return 0;
	node = malloc(sizeof *node + strlen(name) + 1);
	if (!node)
		return ENOMEM;
	node->wd = wd;
	strcpy(node->name, name);
	node->next = w->nodes;
	w->nodes = node;
	w->count++;
	return 0;
}

static int add_tree(struct watch *w, const char *name, bool tell, int depth);

static int add_entry(struct watch *w, int dir, const char *name, const struct dirent *entry, bool tell, int depth)
{
	char child[PATH_MAX];
	struct stat st;

	if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") || !join(child, name, entry->d_name))
		return 0;
	if (tell)
		add_event(w, EV_CREATE, child);
	if (fstatat(dir, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISDIR(st.st_mode))
		return 0;
	return add_tree(w, child, tell, depth + 1);
}

/* Watch NAME and the directories below it. With TELL what is found is reported as created: it came
 * before the watch did. */
static int add_tree(struct watch *w, const char *name, bool tell, int depth)
{
	char path[PATH_MAX];
	struct dirent *entry;
	DIR *dir;
	int rc = add_node(w, name);

	/* A directory that vanished meanwhile is no failure, except the root. */
	if (rc)
		return *name && (rc == ENOENT || rc == ENOTDIR) ? 0 : rc;
	if (!w->recursive || depth > 200 || !join(path, w->root, name) || !(dir = opendir(path)))
		return 0;
	while (!rc && (entry = readdir(dir)))
		rc = add_entry(w, dirfd(dir), name, entry, tell, depth);
	closedir(dir);
	return rc;
}

static void forget_tree(struct watch *w, const char *name)
{
	size_t len = strlen(name);

	for (struct node **at = &w->nodes; *at;) {
		const char *other = (*at)->name;

		if (strncmp(other, name, len) == 0 && (other[len] == '/' || !other[len])) {
			inotify_rm_watch(w->source.fd, (*at)->wd);
			drop_node(w, at);
		} else {
			at = &(*at)->next;
		}
	}
}

static uint8_t kind_of(uint32_t mask)
{
	return mask & (IN_CREATE | IN_MOVED_TO)       ? EV_CREATE
	       : mask & (IN_DELETE | IN_DELETE_SELF)  ? EV_REMOVE
	       : mask & (IN_MOVED_FROM | IN_MOVE_SELF) ? EV_RENAME
	       : mask & IN_ATTRIB                     ? EV_CHMOD
	       : mask & IN_MODIFY                     ? EV_WRITE
	                                              : 0;
}

static void on_event(struct watch *w, const struct inotify_event *event)
{
	struct node **at = &w->nodes;
	char name[PATH_MAX];
	uint8_t kind = kind_of(event->mask);

	if (event->mask & IN_Q_OVERFLOW)
		w->overflow = true;
	while (*at && (*at)->wd != event->wd)
		at = &(*at)->next;
	if (!*at)
		return;
	if (event->mask & IN_IGNORED) {
		w->ended |= !*(*at)->name;
		drop_node(w, at);
		return;
	}
	/* What happens to a watched directory itself is told by its parent; the root has none. */
	if (!event->len && !(event->mask & (IN_DELETE_SELF | IN_MOVE_SELF)))
		return;
	if (!kind || !join(name, (*at)->name, event->len ? event->name : ""))
		return;
	add_event(w, kind, name);
	if (!w->recursive || !(event->mask & IN_ISDIR))
		return;
	if (event->mask & IN_MOVED_FROM)
		forget_tree(w, name);
	else if (event->mask & (IN_CREATE | IN_MOVED_TO) && add_tree(w, name, true, 0))
		w->overflow = true;
}

static void read_events(struct watch *w)
{
	_Alignas(struct inotify_event) char buf[4096];

	while (w->readable && w->used < PENDING / 2) {
		ssize_t n = read(w->source.fd, buf, sizeof buf);

		if (n <= 0) {
			w->readable = n < 0 && errno == EINTR;
			continue;
		}
		for (char *at = buf; at < buf + n;) {
			const struct inotify_event *event = (const void *)at;

			on_event(w, event);
			at += sizeof *event + event->len;
		}
	}
	if (w->overflow && w->used < PENDING / 2) {
		w->overflow = false;
		add_event(w, EV_OVERFLOW, "");
	}
}

static void send_pending(struct watch *w)
{
	struct stream *s = w->stream;
	size_t n = w->used < s->tx_credit[CH_OUT] ? w->used : s->tx_credit[CH_OUT];
	struct writer to;

	if (!n)
		return;
	to = frame_begin();
	put_bytes(&to, w->pending, n);
	frame_end(&to, F_DATA, CH_OUT, 0, s->id);
	s->tx_credit[CH_OUT] -= (uint32_t)n;
	w->used -= n;
	memmove(w->pending, w->pending + n, w->used);
}

static enum progress run(struct task *task)
{
	struct watch *w = CONTAINER(task, struct watch, task);

	if (!link_room())
		return BLOCKED;
	read_events(w);
	send_pending(w);
	if (w->used)
		return w->stream->tx_credit[CH_OUT] ? AGAIN : IDLE;
	if (w->ended) {
		struct stream *s = w->stream;

		discard(w); /* first: the result flushes watches */
		frame_send(F_EOF, CH_OUT, 0, s->id);
		result_ok(s->id, FLAG_FIN);
		stream_free(s);
		return IDLE;
	}
	return w->readable ? AGAIN : IDLE;
}

void watches_flush(void)
{
	for (struct watch *w = watches; w; w = w->next) {
		if (!link_room_twice())
			return;
		/* The event of the epoll round is still to come; the file knows already. */
		w->readable = true;
		read_events(w);
		send_pending(w);
	}
}

static void on_ready(struct source *source, uint32_t events)
{
	struct watch *w = CONTAINER(source, struct watch, source);

	(void)events;
	w->readable = true;
	task_wake(&w->task);
}

static void on_credit(struct stream *s) { task_wake(&((struct watch *)s->impl)->task); }

static void on_close(struct stream *s) { discard(s->impl); }

static const struct stream_ops ops = {.credit = on_credit, .close = on_close};

static int start(struct watch *w, uint32_t id)
{
	int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC), rc;

	if (fd < 0)
		return errno;
	rc = -source_open(&w->source, fd, EPOLLIN, on_ready);
	if (rc) {
		close(fd);
		return rc;
	}
	rc = add_tree(w, "", false, 0);
	if (!rc && !(w->stream = stream_new(id, &ops, w, WINDOW_OTHER)))
		rc = ENOMEM;
	return rc;
}

void op_watch(uint32_t id, struct reader *r)
{
	const char *path = get_text(r);
	bool recursive = get_u8(r);
	int rc = r->bad ? EINVAL : path_check(path);
	struct watch *w = rc ? NULL : calloc(1, sizeof *w);

	if (!w) {
		result_errno(id, rc ? rc : ENOMEM, "watch");
		return;
	}
	w->source.fd = -1;
	w->task.run = run;
	w->recursive = recursive;
	strcpy(w->root, path);
	rc = start(w, id);
	if (rc) {
		discard(w);
		/* The kernel says "no space" when the number of watches is at its limit. */
		result_errno(id, rc == ENOSPC ? EMFILE : rc, "watch");
		return;
	}
	result_ok(id, 0);
	w->next = watches;
	watches = w;
}
