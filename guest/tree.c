/* Killing everything that descends from a command.
 *
 * A command's descendants can leave its session and lose their parents, but they inherit resource
 * limits. RLIMIT_RTTIME means nothing to a process that is not real-time and is larger than any run
 * could last, so its value marks the command: every spawn gets another. It is drawn at random, so
 * that agents which see each other's processes (outside a pid namespace) never share one. */
#include "proc.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

enum { STOP_MS = 300, KILL_MS = 1000 };

struct member {
	pid_t pid, parent, session;
	bool marked, stopped, chosen;
};

static uint64_t mark_limit = 1ULL << 62;

void tree_init(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_RTTIME, &limit) == 0 && limit.rlim_max != RLIM_INFINITY && limit.rlim_max < mark_limit)
		mark_limit = limit.rlim_max;
}

uint64_t tree_mark(void)
{
	static uint64_t last;
	uint64_t half = mark_limit / 2, drawn;

	if (getrandom(&drawn, sizeof drawn, GRND_NONBLOCK) != (ssize_t)sizeof drawn)
		drawn = ++last * 0x9e3779b97f4a7c15 + now_ms();
	return half + drawn % (half ? half : 1);
}

static ssize_t read_proc(pid_t pid, const char *name, char *buf, size_t size)
{
	char path[64];
	ssize_t n;
	int fd;

	snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	n = read(fd, buf, size - 1);
	close(fd);
	buf[n > 0 ? n : 0] = 0;
	return n;
}

static bool read_member(pid_t pid, uint64_t mark, struct member *m)
{
	char buf[4096], *at, state;
	int parent, group, session;

	/* The name may hold anything, so the fields are counted from its last parenthesis. */
	if (read_proc(pid, "stat", buf, sizeof buf) <= 0 || !(at = strrchr(buf, ')')) ||
	    sscanf(at + 1, " %c %d %d %d", &state, &parent, &group, &session) != 4 || state == 'Z' || state == 'X')
		return false;
	*m = (struct member){.pid = pid, .parent = parent, .session = session, .stopped = state == 'T' || state == 't'};
	if (read_proc(pid, "limits", buf, sizeof buf) > 0 && (at = strstr(buf, "Max realtime timeout")))
		m->marked = strtoull(at + strlen("Max realtime timeout"), NULL, 10) == mark;
	return true;
}

static struct member *scan(uint64_t mark, size_t *count)
{
	struct member *all = NULL;
	size_t n = 0, cap = 0;
	DIR *dir = opendir("/proc");
	struct dirent *entry;

	while (dir && (entry = readdir(dir))) {
		pid_t pid = (pid_t)atoi(entry->d_name);

		if (pid <= 1 || pid == getpid())
			continue;
		if (n == cap) {
			size_t more = cap ? 2 * cap : 128;
			struct member *grown = realloc(all, more * sizeof *all);

			if (!grown)
				break;
			all = grown;
			cap = more;
		}
		n += read_member(pid, mark, &all[n]);
	}
	if (dir)
		closedir(dir);
	*count = n;
	return all;
}

static int by_pid(const void *a, const void *b)
{
	const struct member *x = a, *y = b;

	return (x->pid > y->pid) - (x->pid < y->pid);
}

static bool has_chosen_parent(const struct member *all, size_t n, const struct member *m)
{
	struct member key = {.pid = m->parent}, *parent = bsearch(&key, all, n, sizeof key, by_pid);

	return parent && parent->chosen;
}

static void choose(struct member *all, size_t n, pid_t root)
{
	bool more = true;

	qsort(all, n, sizeof *all, by_pid);
	for (size_t i = 0; i < n; i++)
		all[i].chosen = all[i].marked || (root && (all[i].pid == root || all[i].session == root));
	while (more) {
		more = false;
		for (size_t i = 0; i < n; i++)
			if (!all[i].chosen && has_chosen_parent(all, n, &all[i]))
				all[i].chosen = more = true;
	}
}

/* Returns how many processes it was sent to; a SIGSTOP only goes to those that run. */
static size_t signal_tree(pid_t root, uint64_t mark, int number)
{
	size_t n, sent = 0;
	struct member *all = scan(mark, &n);

	if (all)
		choose(all, n, root);
	for (size_t i = 0; i < n; i++)
		if (all[i].chosen && !(number == SIGSTOP && all[i].stopped)) {
			kill(all[i].pid, number);
			sent++;
		}
	free(all);
	return sent;
}

/* A scan can miss what is forked meanwhile, but not twice: a stopped process forks no more. The
 * limits in time are for trees whose members hang in the kernel, where neither signal arrives. */
void tree_kill(pid_t root, uint64_t mark)
{
	uint64_t begin = now_ms();

	while (signal_tree(root, mark, SIGSTOP) && now_ms() - begin < STOP_MS)
		usleep(100);
	begin = now_ms();
	while (signal_tree(root, mark, SIGKILL) && now_ms() - begin < KILL_MS)
		usleep(100);
	if (root) {
		kill(-root, SIGKILL);
		kill(root, SIGKILL);
	}
}
