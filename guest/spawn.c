/* Starting a process. Everything that can fail on the sandbox's side happens in the child, which
 * reports the step through a pipe that a successful exec closes: a cwd that hangs hangs nobody else. */
#include "child.h"
#include "guest.h"
#include "ops.h"
#include "proc.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

struct fds {
	int in[2], out[2], err[2], report[2], master, master2, slave;
};

static void close_all(struct fds *f)
{
	int *fd = (int *)f;

	for (size_t i = 0; i < sizeof *f / sizeof(int); i++)
		if (fd[i] >= 0)
			close(fd[i]);
}

static int open_pty(struct fds *f, struct winsize size)
{
	int unlock = 0, number;
	char path[32];

	f->master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
	if (f->master < 0)
		f->master = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
	if (f->master < 0 || ioctl(f->master, TIOCSPTLCK, &unlock) < 0)
		return -1;
	f->slave = ioctl(f->master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (f->slave < 0) {
		if (ioctl(f->master, TIOCGPTN, &number) < 0)
			return -1;
		snprintf(path, sizeof path, "/dev/pts/%d", number);
		f->slave = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
	}
	f->master2 = f->slave < 0 ? -1 : fcntl(f->master, F_DUPFD_CLOEXEC, 3);
	return f->master2 < 0 || ioctl(f->master, TIOCSWINSZ, &size) < 0 ? -1 : 0;
}

static int open_fds(struct fds *f, const struct launch *l)
{
	memset(f, -1, sizeof *f);
	if (pipe2(f->report, O_CLOEXEC) < 0)
		return -1;
	if (l->flags & SPAWN_PTY)
		return open_pty(f, l->size);
	if (l->flags & SPAWN_STDIN ? pipe2(f->in, O_CLOEXEC) < 0
	                           : (f->in[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0)
		return -1;
	return pipe2(f->out, O_CLOEXEC) < 0 || pipe2(f->err, O_CLOEXEC) < 0 ? -1 : 0;
}

/* Give the parent's ends to P; each that was taken over is marked so in F. */
static int keep(struct proc *p, struct fds *f, void (*on_report)(struct source *, uint32_t))
{
	const struct {
		struct source *source;
		int *fd;
		uint32_t events;
		void (*ready)(struct source *, uint32_t);
	} ends[] = {
	    {&p->report, &f->report[0], EPOLLIN, on_report},
	    {&p->out[0].source, p->pty ? &f->master : &f->out[0], EPOLLIN, proc_on_output},
	    {&p->out[1].source, &f->err[0], EPOLLIN, proc_on_error},
	    {&p->input, p->pty ? &f->master2 : &f->in[1], EPOLLOUT, proc_on_input},
	};

	for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
		int rc = *ends[i].fd < 0 ? 0 : source_open(ends[i].source, *ends[i].fd, ends[i].events, ends[i].ready);

		if (rc < 0)
			return rc;
		*ends[i].fd = -1;
	}
	return 0;
}

static void on_report(struct source *source, uint32_t events)
{
	struct proc *p = CONTAINER(source, struct proc, report);
	struct report report;
	ssize_t n = read(source->fd, &report, sizeof report);

	(void)events;
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	source_close(source);
	if (n == (ssize_t)sizeof report)
		p->failure = report;
	p->started = true;
	task_wake(&p->task);
}

static bool parse(struct launch *l, struct reader *r)
{
	l->flags = get_u8(r);
	l->size.ws_row = get_u16(r);
	l->size.ws_col = get_u16(r);
	l->user = get_text(r);
	l->cwd = get_text(r);
	l->argc = get_u32(r);
	l->argv = *r;
	for (uint32_t i = 0; i < l->argc && !r->bad; i++)
		get_text(r);
	l->envc = get_u32(r);
	l->env = *r;
	for (uint32_t i = 0; i < l->envc && !r->bad; i++)
		get_text(r);
	return !r->bad && r->p == r->end && l->argc > 0;
}

static struct proc *fail(struct proc *p, struct fds *f, uint32_t id, const char *step)
{
	result_errno(id, errno, step);
	close_all(f);
	proc_discard(p);
	return NULL;
}

static struct proc *start(uint32_t id, struct launch *l)
{
	struct proc *p = proc_new();
	struct fds f;
	int rc;

	if (!p) {
		result_error(id, C_LIMIT, ENOMEM, "process");
		return NULL;
	}
	p->pty = l->flags & SPAWN_PTY;
	p->mark = l->mark = tree_mark();
	if (open_fds(&f, l) < 0)
		return fail(p, &f, id, "pipes");
	p->pid = fork();
	if (p->pid == 0) {
		l->in = p->pty ? f.slave : f.in[0];
		l->out = p->pty ? f.slave : f.out[1];
		l->err = p->pty ? f.slave : f.err[1];
		l->report = f.report[1];
		child_run(l);
	}
	if (p->pid < 0)
		return fail(p, &f, id, "fork");
	rc = keep(p, &f, on_report);
	if (rc < 0) {
		tree_kill(p->pid, p->mark);
		errno = -rc;
		return fail(p, &f, id, "epoll");
	}
	close_all(&f);
	return p;
}

void op_spawn(uint32_t id, struct reader *r)
{
	struct launch l = {0};
	struct reader whole = *r;
	struct proc *p;

	if (!parse(&l, r)) {
		result_error(id, C_INVALID, EINVAL, "request");
		return;
	}
	guest_settle();
	p = start(id, &l);
	if (!p)
		return;
	p->stream = stream_new(id, &proc_stream_ops, p, WINDOW_PROC);
	if (!p->stream) {
		tree_kill(p->pid, p->mark);
		result_error(id, C_LIMIT, ENOMEM, "stream");
		proc_discard(p);
		return;
	}
	p->spec_len = (uint32_t)(whole.end - whole.p);
	p->spec = p->spec_len <= PAYLOAD_MAX ? malloc(p->spec_len) : NULL;
	if (p->spec)
		memcpy(p->spec, whole.p, p->spec_len);
	else
		p->spec_len = 0;
}
