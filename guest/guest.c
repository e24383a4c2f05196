#include "guest.h"

#include "child.h"

#include "net.h"
#include "tick.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#define HOME "/sandyard"
#define NEW "/new"
#define GROUP "/sys/fs/cgroup/sandbox"
#define INSIDE GROUP "/inside" /* what was started */
#define OUTSIDE GROUP "/agent" /* who has to answer also when there is no memory left inside */

enum {
	DEVICE_WAIT_MS = 30000,
	CONF_MAX = 1 << 20,
	STILL_SECONDS = 5,
	FREEZE_MS = 2000,
	LAYERS_MAX = 24,
};

static int disk_fd = -1;
static pid_t keeper;
static uint64_t memory_most, lent; /* bytes of the sandbox, and of those what files take that the agent wrote */

static _Noreturn void give_up(const char *what, const char *name)
{
	dprintf(2, "sandyard: %s %s: %s\n", what, name, strerror(errno));
	/* The end of PID 1 is a panic, which the host sees; until then the console is read to its end. */
	usleep(100000);
	_exit(1);
}

static void make_dir(const char *path)
{
	if (mkdir(path, 0755) < 0 && errno != EEXIST)
		give_up("mkdir", path);
}

static void mount_at(const char *source, const char *where, const char *type, unsigned long flags, const char *options)
{
	make_dir(where);
	if (mount(source, where, type, flags, options) < 0)
		give_up("mount", where);
}

static bool write_text(const char *path, const char *text, size_t len)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
	bool fine = fd >= 0 && write(fd, text, len) == (ssize_t)len;

	if (fd >= 0)
		close(fd);
	return fine;
}

/* At most SIZE - 1 bytes and a NUL; the last newline goes. */
static ssize_t read_text(const char *path, char *text, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, text, size - 1);

	if (fd >= 0)
		close(fd);
	if (n < 0)
		return n;
	if (n > 0 && text[n - 1] == '\n')
		n--;
	text[n] = 0;
	return n;
}

static void load_modules(void)
{
	FILE *list = fopen(HOME "/modules", "re");
	char name[128], path[192];

	if (!list)
		give_up("open", HOME "/modules");
	while (fscanf(list, "%127s", name) == 1) {
		int fd;

		snprintf(path, sizeof path, HOME "/%s", name);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST))
			give_up("module", name);
		close(fd);
		unlink(path);
	}
	fclose(list);
}

/* How big a free piece of memory must be (a power of two of pages) for the host to be told, once it stays free for two
 * seconds. The kernel's own 2 MiB leave out much of a small guest, and are told only while 64 MiB are free. */
static void give_back_memory(void)
{
	/* A kernel that cannot give anything back has no such file. */
	write_text("/sys/module/page_reporting/parameters/page_reporting_order", "4", 1);
}

/* Find the entry of directory SYS whose file ATTRIBUTE holds VALUE; its device becomes PATH. */
static bool find_device(const char *sys, const char *attribute, const char *value, char *path, size_t size)
{
	DIR *dir = opendir(sys);
	struct dirent *entry;
	bool found = false;

	while (dir && !found && (entry = readdir(dir))) {
		char file[512], text[128];

		snprintf(file, sizeof file, "%s/%s/%s", sys, entry->d_name, attribute);
		if (entry->d_name[0] == '.' || read_text(file, text, sizeof text) < 0 || strcmp(text, value) != 0)
			continue;
		snprintf(path, size, "/dev/%s", entry->d_name);
		found = access(path, F_OK) == 0;
	}
	if (dir)
		closedir(dir);
	return found;
}

static void wait_device(const char *sys, const char *attribute, const char *value, char *path, size_t size)
{
	for (int i = 0; !find_device(sys, attribute, value, path, size); i++) {
		if (i == DEVICE_WAIT_MS / 10) {
			errno = ENODEV;
			give_up("device", value);
		}
		usleep(10000);
	}
}

static void wait_disk(const char *serial, char *path, size_t size) { wait_device("/sys/block", "serial", serial, path, size); }

static int open_port(void)
{
	char path[300];
	int fd;

	wait_device("/sys/class/virtio-ports", "name", "sandyard.agent", path, sizeof path);
	fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		give_up("open", path);
	return fd;
}

/* What the host wants: records of a letter and a text, each ended by NUL; an empty one ends them. */
static char *read_configuration(void)
{
	char path[300], *conf = calloc(1, CONF_MAX + 2);
	size_t len = 0;
	ssize_t n;
	int fd;

	wait_disk("conf", path, sizeof path);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || !conf)
		give_up("open", path);
	while (len < CONF_MAX && (n = read(fd, conf + len, CONF_MAX - len)) > 0)
		len += (size_t)n;
	close(fd);
	return conf;
}

static const char *next_record(const char *record) { return record + strlen(record) + 1; }

static const char *find_record(const char *conf, char kind)
{
	for (; *conf; conf = next_record(conf))
		if (*conf == kind)
			return conf + 1;
	return NULL;
}

static void mount_root(const char *conf)
{
	char device[300], where[32], options[64 + 20 * LAYERS_MAX];
	const char *layers = find_record(conf, 'l');
	int count = layers ? atoi(layers) : 0;
	size_t at;

	wait_disk("base", device, sizeof device);
	mount_at(device, "/base", "ext4", MS_RDONLY | MS_NOATIME, NULL);
	wait_disk("disk", device, sizeof device);
	mount_at(device, "/disk", "ext4", MS_NOATIME, "discard");
	disk_fd = open("/disk", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	make_dir("/disk/upper");
	make_dir("/disk/work");
	at = (size_t)snprintf(options, sizeof options, "upperdir=/disk/upper,workdir=/disk/work,lowerdir=");
	for (int i = 0; i < count && i < LAYERS_MAX; i++) {
		snprintf(where, sizeof where, "layer%d", i);
		wait_disk(where, device, sizeof device);
		snprintf(where, sizeof where, "/layer%d", i);
		mount_at(device, where, "ext4", MS_RDONLY | MS_NOATIME, "noload");
		at += (size_t)snprintf(options + at, sizeof options - at, "%s/upper:", where);
	}
	snprintf(options + at, sizeof options - at, "/base");
	mount_at("overlay", NEW, "overlay", 0, options);
}

static void make_devices(void)
{
	static const struct {
		const char *name;
		unsigned major, minor;
	} nodes[] = {{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}};
	char path[64];

	for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
		snprintf(path, sizeof path, NEW "/dev/%s", nodes[i].name);
		if (mknod(path, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)) < 0)
			give_up("mknod", path);
	}
	if (symlink("pts/ptmx", NEW "/dev/ptmx") < 0 || symlink("/proc/self/fd", NEW "/dev/fd") < 0 ||
	    symlink("/proc/self/fd/0", NEW "/dev/stdin") < 0 || symlink("/proc/self/fd/1", NEW "/dev/stdout") < 0 ||
	    symlink("/proc/self/fd/2", NEW "/dev/stderr") < 0)
		give_up("symlink", NEW "/dev");
}

static void mount_system(void)
{
	const unsigned long quiet = MS_NOSUID | MS_NODEV | MS_NOEXEC;

	mount_at("proc", NEW "/proc", "proc", quiet, NULL);
	mount_at("sysfs", NEW "/sys", "sysfs", quiet | MS_RDONLY, NULL);
	mount_at("cgroup", NEW "/sys/fs/cgroup", "cgroup2", quiet, NULL);
	mount_at("tmpfs", NEW "/dev", "tmpfs", MS_NOSUID, "mode=755,size=64k");
	make_devices();
	mount_at("devpts", NEW "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5");
	mount_at("shm", NEW "/dev/shm", "tmpfs", quiet, "mode=1777,size=64m");
	mount_at("mqueue", NEW "/dev/mqueue", "mqueue", quiet, NULL);
	make_dir(NEW "/run");
	mount_at("told", NEW "/run/sandyard", "tmpfs", quiet, "mode=755,size=4m");
}

static void need_text(const char *path, const char *text)
{
	if (!write_text(path, text, strlen(text)))
		give_up("write", path);
}

/* Every process counts, this one too; the limit of memory holds for what it starts. */
static void enter_group(void)
{
	struct rlimit files = {.rlim_cur = 65536, .rlim_max = 1048576};

	need_text("/sys/fs/cgroup/cgroup.subtree_control", "+memory +pids");
	make_dir(GROUP);
	need_text(GROUP "/cgroup.subtree_control", "+memory");
	make_dir(OUTSIDE);
	make_dir(INSIDE);
	need_text(OUTSIDE "/cgroup.procs", "0");
	child_group = open(INSIDE "/cgroup.procs", O_WRONLY | O_CLOEXEC);
	if (child_group < 0)
		give_up("open", INSIDE "/cgroup.procs");
	need_text("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
	/* A kernel without memory for itself, beyond the limit of the group, ends: it would only linger. */
	need_text("/proc/sys/vm/panic_on_oom", "1");
	setrlimit(RLIMIT_NOFILE, &files);
}

static void move_root(void)
{
	if (chdir(NEW) < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0)
		give_up("root", NEW);
}

static int limit(const char *path, const char *value)
{
	return write_text(path, value, strlen(value)) ? 0 : -1;
}

static int add_environment(const char *pair)
{
	char *copy = strdup(pair);

	return copy ? putenv(copy) : -1;
}

/* One record about the inside; *CONF moves on where it has two texts. 0, or -1 with errno. */
static int apply_one(const char **conf)
{
	const char *text = *conf + 1;

	switch (**conf) {
	case 'p':
		return limit(GROUP "/pids.max", text);
	case 'm':
		memory_most = strtoull(text, NULL, 10);
		lent = 0;
		return limit(INSIDE "/memory.max", text);
	case 'E':
		return clearenv();
	case 'e':
		return add_environment(text);
	case 'h':
		return sethostname(text, strlen(text));
	case 'd':
		return mkdir(text, 0755) < 0 && errno != EEXIST ? -1 : 0;
	case 'f':
		*conf = next_record(*conf);
		if (!**conf)
			return errno = EINVAL, -1;
		return write_text(text, *conf + 1, strlen(*conf + 1)) ? 0 : -1;
	case 'n':
		return net_uplink(text);
	default:
		return 0;
	}
}

int guest_configure(const char *conf, const char **failed)
{
	if (disk_fd < 0)
		return ENOTTY;
	for (; *conf; conf = next_record(conf)) {
		*failed = conf;
		errno = EIO; /* of a write that was short */
		if (apply_one(&conf) < 0)
			return errno;
	}
	return 0;
}

bool guest_is_ours(void) { return getpid() == 1 && access(HOME "/modules", R_OK) == 0; }

int guest_enter(void)
{
	const char *failed = "";
	int console, port;
	char *conf;

	umask(0);
	mount_at("dev", "/dev", "devtmpfs", MS_NOSUID, NULL);
	console = open("/dev/console", O_WRONLY | O_NOCTTY);
	if (console >= 0)
		dup2(console, 2);
	mount_at("proc", "/proc", "proc", 0, NULL);
	mount_at("sysfs", "/sys", "sysfs", 0, NULL);
	load_modules();
	give_back_memory();
	tick_rest();
	conf = read_configuration();
	port = open_port();
	if (!find_record(conf, 'P')) {
		mount_root(conf);
		mount_system();
		move_root();
		enter_group();
		if (guest_configure(conf, &failed) != 0)
			give_up("configure", failed);
	}
	if (net_loopback() < 0)
		give_up("interface", "lo");
	free(conf);
	if (console >= 0)
		close(console);
	close(0);
	close(1);
	close(2);
	return port;
}

static uint64_t disk_used(void)
{
	struct statfs st;

	if (disk_fd < 0 || fstatfs(disk_fd, &st) < 0)
		return 0;
	return ((uint64_t)st.f_blocks - (uint64_t)st.f_bfree) * (uint64_t)st.f_bsize;
}

/* The number in a file of the sandbox's group: the whole of it, or that of the line which begins with NAME. */
static uint64_t counter(const char *file, const char *name)
{
	char path[64], text[4096], *at = text;
	size_t len = strlen(name);

	snprintf(path, sizeof path, GROUP "/%s", file);
	if (read_text(path, text, sizeof text) < 0)
		return 0;
	while (len && at && (strncmp(at, name, len) != 0 || at[len] != ' ')) {
		at = strchr(at, '\n');
		at += at != NULL;
	}
	return at ? strtoull(at + len, NULL, 10) : 0;
}

void guest_use(struct guest_use *use)
{
	guest_settle();
	use->disk = disk_used();
	use->memory = counter("memory.current", "");
	use->cache = counter("memory.stat", "file");
	use->pids = counter("pids.current", "");
	use->oom_kills = counter("memory.events", "oom_kill");
}

/* Of the limit, what files in memory take that are the agent's, and will: the rest is for all it starts. */
static void share(uint64_t ours)
{
	char text[24];

	if (ours == lent)
		return;
	snprintf(text, sizeof text, "%llu", (unsigned long long)(memory_most > ours ? memory_most - ours : 0));
	if (limit(INSIDE "/memory.max", text) == 0)
		lent = ours; /* else the next one tries again */
}

static uint64_t files_of_ours(void) { return counter("agent/memory.stat", "shmem"); }

bool guest_has_room(int fd, size_t len)
{
	struct statfs st;
	uint64_t ours;

	if (!memory_most || fstatfs(fd, &st) < 0 || st.f_type != TMPFS_MAGIC)
		return true;
	ours = files_of_ours() + len;
	if (counter("inside/memory.current", "") + ours > memory_most)
		return false;
	share(ours);
	return true;
}

void guest_settle(void)
{
	if (lent)
		share(files_of_ours());
}

static void keep(void)
{
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	sleep(STILL_SECONDS);
	ioctl(disk_fd, FITHAW, 0);
	_exit(0);
}

static int thaw_disk(void)
{
	if (keeper > 0)
		kill(keeper, SIGKILL);
	keeper = 0;
	/* EINVAL: its keeper was quicker. */
	return ioctl(disk_fd, FITHAW, 0) < 0 && errno != EINVAL ? errno : 0;
}

static int freeze_disk(void)
{
	if (keeper > 0)
		kill(keeper, SIGKILL);
	keeper = fork();
	if (keeper < 0)
		return errno;
	if (keeper == 0)
		keep();
	/* EBUSY: it stands still already. */
	return ioctl(disk_fd, FIFREEZE, 0) < 0 && errno != EBUSY ? errno : 0;
}

static bool is_frozen(void)
{
	char text[128];

	return read_text(INSIDE "/cgroup.events", text, sizeof text) < 0 || strstr(text, "frozen 1");
}

/* One that waits for its disk cannot be stopped there, but does not come back to code of its own either. */
static int freeze_processes(bool still)
{
	if (child_group < 0)
		return ENOTTY;
	if (!write_text(INSIDE "/cgroup.freeze", still ? "1" : "0", 1))
		return errno;
	for (int i = 0; still && i < FREEZE_MS && !is_frozen(); i++)
		usleep(1000);
	return 0;
}

int guest_freeze(bool disk, bool processes)
{
	int err = 0;

	if (disk_fd < 0)
		return ENOTTY;
	if (!disk)
		err = thaw_disk();
	if (!err)
		err = freeze_processes(processes);
	if (!err && disk)
		err = freeze_disk();
	return err;
}
