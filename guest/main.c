/* The agent: PID 1 of a sandbox. Serves one host link at a time, reaps every orphan. */
#include "child.h"
#include "guest.h"
#include "link.h"
#include "ops.h"
#include "proc.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static struct source signals = {.fd = -1};

static _Noreturn void shut_down(void)
{
	uint64_t end = now_ms() + 2000;

	if (getpid() == 1)
		kill(-1, SIGKILL);
	else
		for (struct proc *p = procs; p; p = p->next)
			tree_kill(p->exited ? 0 : p->pid, p->mark);
	while (now_ms() < end && (waitpid(-1, NULL, WNOHANG) >= 0 || errno != ECHILD))
		usleep(1000);
	_exit(0);
}

static void on_signal(struct source *source, uint32_t events)
{
	struct signalfd_siginfo info;

	(void)events;
	while (read(source->fd, &info, sizeof info) == (ssize_t)sizeof info)
		/* As PID 1 only the host may end us: a sender inside the pid namespace has a pid here, it has none. */
		if (info.ssi_signo != SIGCHLD && (getpid() != 1 || info.ssi_pid == 0))
			shut_down();
	proc_reap();
}

static int open_signals(void)
{
	static const int ignored[] = {SIGPIPE, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGTSTP, SIGTTIN, SIGTTOU};
	sigset_t set;
	int fd;

	for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++)
		signal(ignored[i], SIG_IGN);
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigprocmask(SIG_SETMASK, &set, NULL);
	fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	return fd < 0 ? -errno : source_open(&signals, fd, EPOLLIN, on_signal);
}

static void open_standard_files(void)
{
	int fd;

	/* Below 3 nothing of ours may live: children get their own files there. */
	do
		fd = open("/dev/null", O_RDWR);
	while (fd >= 0 && fd < 3);
	if (fd >= 3)
		close(fd);
}

static void raise_file_limit(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
		return;
	child_files = limit;
	limit.rlim_cur = limit.rlim_max < 65536 ? limit.rlim_max : 65536;
	setrlimit(RLIMIT_NOFILE, &limit);
}

static void make_boot_id(void)
{
	uint8_t bytes[16];
	struct timespec ts;

	/* Early in a guest's boot the pool may not be ready: an id that is only unlikely to repeat will do. */
	if (getrandom(bytes, sizeof bytes, GRND_NONBLOCK) != (ssize_t)sizeof bytes) {
		clock_gettime(CLOCK_REALTIME, &ts);
		memcpy(bytes, &ts.tv_sec, 8);
		memcpy(bytes + 8, &ts.tv_nsec, 8);
	}
	for (size_t i = 0; i < sizeof bytes; i++)
		snprintf(boot_id + 2 * i, 3, "%02x", bytes[i]);
}

static void on_round(void)
{
	proc_deadlines();
	link_round();
}

static int usage(void)
{
	fprintf(stderr, "usage: sandyard-agent --listen-fd N | --connect-fd N | --version\n");
	return 2;
}

int main(int argc, char **argv)
{
	bool listening = argc == 3 && strcmp(argv[1], "--listen-fd") == 0;
	bool guest = guest_is_ours();
	int fd;

	if (argc == 2 && strcmp(argv[1], "--version") == 0)
		return printf("sandyard-agent %s protocol %d\n", AGENT_VERSION, PROTO_VERSION) < 0;
	if (!guest && (argc != 3 || (!listening && strcmp(argv[1], "--connect-fd") != 0)))
		return usage();
	fd = guest ? guest_enter() : atoi(argv[2]);
	if (fd < 0 || fcntl(fd, F_GETFD) < 0) {
		fprintf(stderr, "sandyard-agent: descriptor %s is not open\n", argv[2]);
		return 2;
	}
	open_standard_files();
	umask(0);
	prctl(PR_SET_DUMPABLE, 0);
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	raise_file_limit();
	make_boot_id();
	tree_init();
	if (loop_init() < 0 || open_signals() < 0)
		return 1;
	if (listening && !guest)
		link_listen(fd);
	else
		link_connect(fd);
	proc_reap();
	loop_run(proc_timeout, on_round);
}
