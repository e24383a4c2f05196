#include "child.h"

#include "proto.h"
#include "users.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

struct rlimit child_files;
int child_group = -1;
static int report_fd;

static _Noreturn void fail(enum code code, int err, const char *step)
{
	struct report report = {.code = (int)code, .err = err};

	snprintf(report.step, sizeof report.step, "%s", step);
	_exit(write(report_fd, &report, sizeof report) < 0 ? 126 : 127);
}

static enum code spawn_code(int err)
{
	switch (err) {
	case ENOENT: case ENOTDIR: return C_NOT_FOUND;
	case EACCES: case EPERM: return C_PERMISSION;
	case E2BIG: case ENAMETOOLONG: return C_TOO_BIG;
	case EAGAIN: case ENOMEM: case EMFILE: case ENFILE: return C_LIMIT;
	case EINVAL: case ELOOP: case ENOEXEC: return C_INVALID;
	default: return C_IO;
	}
}

static void raise_oom_score(void)
{
	int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	/* Without /proc, or in a parent that is raised higher already, the kernel's own choice has to do. */
	if (fd >= 0 && write(fd, "500", 3) < 0)
		errno = 0;
	if (fd >= 0)
		close(fd);
}

void child_reset(void)
{
	sigset_t none;

	/* By the bare call: the C library refuses its internal signals, which a posix_spawn above may have
	 * left ignored. All zero is SIG_DFL, no flags, no mask. */
	static const unsigned long defaults[4];
	for (int i = 1; i <= 64; i++)
		syscall(SYS_rt_sigaction, i, defaults, NULL, (size_t)8);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	raise_oom_score();
}

static void set_limits(const struct launch *l)
{
	struct rlimit mark = {.rlim_cur = (rlim_t)l->mark, .rlim_max = (rlim_t)l->mark};

	setrlimit(RLIMIT_RTTIME, &mark);
	if (child_files.rlim_max)
		setrlimit(RLIMIT_NOFILE, &child_files);
}

/* Put the files at 0, 1, 2 and the report at 3, and nothing else. The ends may be at any number above 2. */
static void set_files(struct launch *l, const struct user *user)
{
	report_fd = fcntl(l->report, F_DUPFD_CLOEXEC, 10);
	setsid();
	if (l->flags & SPAWN_PTY) {
		if (fchown(l->in, user->uid, (gid_t)-1) < 0 && errno != EPERM && errno != EROFS)
			fail(C_IO, errno, "terminal");
		if (ioctl(l->in, TIOCSCTTY, 0) < 0)
			fail(C_IO, errno, "terminal");
	}
	if (dup2(l->in, 0) < 0 || dup2(l->out, 1) < 0 || dup2(l->err, 2) < 0 || dup3(report_fd, 3, O_CLOEXEC) < 0)
		fail(C_LIMIT, errno, "files");
	report_fd = 3;
#ifdef SYS_close_range
	/* Everything is close-on-exec; closing now lets other spawns see the end of their report pipes. */
	syscall(SYS_close_range, 4U, ~0U, 0U);
#endif
}

static void set_user(const struct user *user)
{
	static gid_t groups[GROUPS_MAX];
	int n = user_groups(user, groups);

	if (geteuid() != 0) {
		if (user->uid != geteuid())
			fail(C_PERMISSION, EPERM, "user");
		return;
	}
	if (setgroups((size_t)n, groups) < 0)
		fail(spawn_code(errno), errno, "groups");
	if (setresgid(user->gid, user->gid, user->gid) < 0)
		fail(spawn_code(errno), errno, "group");
	if (setresuid(user->uid, user->uid, user->uid) < 0)
		fail(spawn_code(errno), errno, "user");
}

static void set_cwd(const struct launch *l, const struct user *user)
{
	if (!*l->cwd) {
		if (chdir(user->home) < 0 && chdir("/") < 0)
			fail(C_IO, errno, "cwd");
		return;
	}
	if (chdir(l->cwd) == 0)
		return;
	fail(errno == ENOENT || errno == ENOTDIR ? C_NO_CWD : spawn_code(errno), errno, "cwd");
}

static bool has(char **env, const char *name)
{
	size_t len = strlen(name);

	for (; *env; env++)
		if (strncmp(*env, name, len) == 0 && (*env)[len] == '=')
			return true;
	return false;
}

static char **add(char **env, char **end, const char *name, const char *value)
{
	size_t size = strlen(name) + strlen(value) + 2;

	if (has(env, name))
		return end;
	*end = malloc(size);
	if (!*end)
		fail(C_LIMIT, ENOMEM, "env");
	snprintf(*end, size, "%s=%s", name, value);
	end[1] = NULL;
	return end + 1;
}

static char **strings(struct reader *r, uint32_t count, size_t spare)
{
	char **list = calloc(count + spare + 1, sizeof *list);

	if (!list)
		fail(C_LIMIT, ENOMEM, "arguments");
	for (uint32_t i = 0; i < count; i++)
		list[i] = (char *)(uintptr_t)get_text(r);
	return list;
}

static char **environment(struct launch *l, const struct user *user)
{
	char **env = strings(&l->env, l->envc, 6), **end = env + l->envc;

	end = add(env, end, "HOME", user->home);
	end = add(env, end, "USER", user->name);
	end = add(env, end, "LOGNAME", user->name);
	end = add(env, end, "SHELL", user->shell);
	end = add(env, end, "LANG", "C.UTF-8");
	add(env, end, "PATH", DEFAULT_PATH);
	return env;
}

static void exec_file(const char *path, char **argv, char **env, uint32_t argc)
{
	char **shell;

	execve(path, argv, env);
	if (errno != ENOEXEC)
		return;
	/* A script without an interpreter line, as a shell would run it. */
	shell = calloc(argc + 2, sizeof *shell);
	if (!shell)
		return;
	shell[0] = (char *)(uintptr_t)"sh";
	shell[1] = (char *)(uintptr_t)path;
	memcpy(shell + 2, argv + 1, argc * sizeof *shell);
	execve("/bin/sh", shell, env);
	errno = ENOEXEC;
}

static _Noreturn void exec_search(char **argv, char **env, uint32_t argc)
{
	const char *path = DEFAULT_PATH;
	int denied = 0;

	if (!*argv[0])
		fail(C_NOT_FOUND, ENOENT, "command");
	if (strchr(argv[0], '/')) {
		exec_file(argv[0], argv, env, argc);
		fail(spawn_code(errno), errno, "command");
	}
	for (char **e = env; *e; e++)
		if (strncmp(*e, "PATH=", 5) == 0) {
			path = *e + 5;
			break;
		}
	while (path) {
		char file[4096];
		const char *colon = strchr(path, ':');
		int len = colon ? (int)(colon - path) : (int)strlen(path);
		int n = snprintf(file, sizeof file, "%.*s%s%s", len, path, len ? "/" : "./", argv[0]);

		path = colon ? colon + 1 : NULL;
		if (n >= (int)sizeof file)
			continue;
		exec_file(file, argv, env, argc);
		if (errno == EACCES)
			denied = EACCES;
		else if (errno != ENOENT && errno != ENOTDIR)
			fail(spawn_code(errno), errno, "command");
	}
	fail(denied ? C_PERMISSION : C_NOT_FOUND, denied ? denied : ENOENT, "command");
}

_Noreturn void child_run(struct launch *l)
{
	struct user user;
	char **argv, **env;

	report_fd = l->report;
	child_reset();
	if (user_find(l->user, &user) < 0)
		fail(C_NO_USER, 0, "user");
	if (child_group >= 0 && write(child_group, "0", 1) < 0)
		fail(spawn_code(errno), errno, "group");
	set_limits(l);
	set_files(l, &user);
	umask(022);
	argv = strings(&l->argv, l->argc, 0);
	env = environment(l, &user);
	set_user(&user);
	set_cwd(l, &user);
	exec_search(argv, env, l->argc);
}
