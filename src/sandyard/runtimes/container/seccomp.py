"""The system calls a sandbox may make: an allow-list, everything else is EPERM.

Grouped by what they are for. Left out on purpose: mounting and namespaces (mount, umount2,
pivot_root, unshare, setns, the fsopen family), kernel images and modules, bpf, perf_event_open,
userfaultfd, io_uring, the older io_setup (its contexts are one small number for the whole host),
keyrings, clocks, swap, quota, NUMA placement, handles of files (open_by_handle_at), fanotify, and
the 32-bit multiplexers whose arguments cannot be looked at.
ptrace stays: debuggers are honest tools, and the kernel already refuses the agent (not dumpable)
and processes of other users (no CAP_SYS_PTRACE).
"""

from __future__ import annotations

import platform
from typing import Any

EPERM, ENOSYS = 1, 38

_FILES = """
access chdir chmod chown chown32 close close_range copy_file_range creat dup dup2 dup3 faccessat
faccessat2 fadvise64 fadvise64_64 arm_fadvise64_64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchown32
fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fremovexattr fsetxattr fstat fstat64
fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futimesat getcwd getdents getdents64
getxattr getxattrat inotify_add_watch inotify_init inotify_init1 inotify_rm_watch ioctl lchown lchown32
lgetxattr link linkat listxattr listxattrat llistxattr _llseek lremovexattr lseek lsetxattr lstat
lstat64 mkdir mkdirat mknod mknodat name_to_handle_at newfstatat open openat openat2 oldfstat
oldlstat oldstat pipe pipe2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink
readlinkat readv removexattr removexattrat rename renameat renameat2 rmdir sendfile sendfile64
setxattr setxattrat splice stat stat64 statfs statfs64 statmount listmount statx symlink symlinkat
sync sync_file_range sync_file_range2 arm_sync_file_range syncfs tee truncate truncate64 umask unlink unlinkat
utime utimensat utimensat_time64 utimes vmsplice write writev chroot cachestat
"""
_MEMORY = """
brk madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mlock mlock2 mlockall mmap
mmap2 modify_ldt mprotect mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free
pkey_mprotect process_madvise process_mrelease process_vm_readv process_vm_writev remap_file_pages
"""
_PROCESSES = """
alarm arch_prctl capget capset execve execveat exit exit_group fork get_robust_list
get_thread_area getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups getgroups32 getpgid
getpgrp getpid getppid getpriority getresgid getresgid32 getresuid getresuid32 getrlimit getrusage
getsid gettid getuid getuid32 ioprio_get ioprio_set kcmp kill landlock_add_rule
landlock_create_ruleset landlock_restrict_self nice pause pidfd_getfd pidfd_open pidfd_send_signal
prctl prlimit64 ptrace restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask
rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo
sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam
sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64 sched_setaffinity
sched_setattr sched_setparam sched_setscheduler sched_yield seccomp set_robust_list set_thread_area
set_tid_address set_tls setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups
setgroups32 setpgid setpriority setregid setregid32 setresgid setresgid32 setresuid setresuid32
setreuid setreuid32 setrlimit setsid setuid setuid32 sgetmask sigaction sigaltstack signal signalfd
signalfd4 sigpending sigprocmask sigreturn sigsuspend ssetmask sysinfo tgkill time times tkill
ugetrlimit uname vfork wait4 waitid waitpid getcpu cacheflush breakpoint riscv_flush_icache
"""
_TIME = """
clock_getres clock_getres_time64 clock_gettime clock_gettime64 clock_nanosleep
clock_nanosleep_time64 getitimer gettimeofday nanosleep setitimer timer_create timer_delete
timer_getoverrun timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create
timerfd_gettime timerfd_gettime64 timerfd_settime timerfd_settime64
"""
_WAITING = """
epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait
epoll_wait_old eventfd eventfd2 futex futex_requeue futex_time64 futex_wait futex_waitv futex_wake
poll ppoll
ppoll_time64 pselect6 pselect6_time64 select _newselect
"""
_TALKING = """
accept accept4 bind connect getpeername getrandom getsockname getsockopt listen mq_getsetattr
mq_notify mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink
msgctl msgget msgrcv msgsnd recv recvfrom recvmmsg recvmmsg_time64 recvmsg semctl semget semop
semtimedop semtimedop_time64 send sendmmsg sendmsg sendto setsockopt shmat shmctl shmdt shmget
shutdown socketpair
"""
ALLOWED = tuple(" ".join((_FILES, _MEMORY, _PROCESSES, _TIME, _WAITING, _TALKING)).split())

# Socket families: local, IPv4, IPv6, netlink, packet (for CAP_NET_RAW inside an empty network).
SOCKET_FAMILIES = (1, 2, 10, 16, 17)
# Linux, ADDR_NO_RANDOMIZE for debuggers, UNAME26, both, and the query.
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF, 0x40000)
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
CLONE_NAMESPACES = 0x7E020000

_ARCHITECTURES = {
    "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],  # x32 is refused: same kernel, twice the surface
    "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
}


def profile(machine: str | None = None) -> dict[str, Any]:
    """The `linux.seccomp` object of an OCI configuration for `machine` (default: this one)."""
    machine = machine or platform.machine()
    rules: list[dict[str, Any]] = [{"names": list(ALLOWED), "action": "SCMP_ACT_ALLOW"}]
    rules += [_when("socket", family) for family in SOCKET_FAMILIES]
    rules += [_when("personality", value) for value in PERSONALITIES]
    # A masked comparison: none of these bits set.
    rules.append(_when("clone", CLONE_NAMESPACES, op="SCMP_CMP_MASKED_EQ", second=0))
    # Its flags lie behind a pointer, out of a filter's sight; callers fall back to clone on ENOSYS.
    rules.append({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS})
    rules.append({"names": ["io_setup"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS})  # callers fall back
    seccomp: dict[str, Any] = {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": EPERM, "syscalls": rules}
    if machine in _ARCHITECTURES:
        seccomp["architectures"] = _ARCHITECTURES[machine]
    return seccomp


def _when(name: str, value: int, *, op: str = "SCMP_CMP_EQ", second: int | None = None) -> dict[str, Any]:
    argument: dict[str, Any] = {"index": 0, "value": value, "op": op}
    if second is not None:
        argument["valueTwo"] = second
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [argument]}
