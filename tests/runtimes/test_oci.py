"""The OCI configuration: what a sandbox may, and may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.container.oci import configuration, limits
from sandyard.runtimes.container.seccomp import ALLOWED, profile
from sandyard.runtimes.container.shared import INOTIFY_INSTANCES, INOTIFY_WATCHES, raise_host_limits

FORBIDDEN = [
    *("mount", "umount2", "pivot_root", "unshare", "setns", "bpf", "keyctl", "add_key", "request_key"),
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "userfaultfd"),
    *("perf_event_open", "io_uring_setup", "io_uring_enter", "io_uring_register", "open_by_handle_at"),
    *("reboot", "swapon", "swapoff", "settimeofday", "clock_settime", "clock_adjtime", "acct", "quotactl"),
    *("iopl", "ioperm", "fsopen", "fsmount", "move_mount", "open_tree", "mount_setattr", "fanotify_init"),
    *("io_submit", "socketcall", "ipc", "nfsservctl", "lookup_dcookie"),
]


def made() -> dict[str, Any]:
    spec = SandboxSpec("box", Rootfs([Path("/layer")], env={"LANG": "de_DE.UTF-8", "X": "1"}), hostname="name")
    return configuration(
        spec,
        rootfs=Path("/mnt/rootfs"),
        agent=Path("/agent"),
        launcher=Path("/launch"),
        boot_id=Path("/run/box/boot_id"),
        cgroup="/mine/box",
        uid_base=100000,
        swap_limit=True,
    )


def test_each_sandbox_has_its_own_boot_id_and_limit_of_what_is_charged_to_root() -> None:
    (hook,) = made()["hooks"]["createRuntime"]
    bounds = [str(INOTIFY_INSTANCES), str(INOTIFY_WATCHES)]
    assert hook["args"][1:] == ["--finish", *bounds, "/run/box/boot_id", "/mnt/rootfs"]


def test_host_limits_are_raised_and_never_lowered(tmp_path: Path) -> None:
    (tmp_path / "max_user_instances").write_text("128\n")
    (tmp_path / "max_user_watches").write_text("900\n")
    needed = {"max_user_instances": 500, "max_user_watches": 800, "max_unknown": 1}
    assert raise_host_limits(tmp_path, needed) == {"max_user_instances": 500, "max_user_watches": 900}
    assert (tmp_path / "max_user_instances").read_text() == "500"


def test_it_is_json_with_every_namespace() -> None:
    config = json.loads(json.dumps(made()))
    kinds = {namespace["type"] for namespace in config["linux"]["namespaces"]}
    assert kinds == {"user", "pid", "mount", "uts", "ipc", "network", "cgroup"}
    assert all("path" not in namespace for namespace in config["linux"]["namespaces"])
    assert config["linux"]["uidMappings"] == [{"containerID": 0, "hostID": 100000, "size": 65536}]
    assert config["hostname"] == "name"
    assert config["linux"]["cgroupsPath"] == "/mine/box"


def test_the_template_s_environment_goes_over_the_default() -> None:
    env = dict(item.split("=", 1) for item in made()["process"]["env"])
    assert env["LANG"] == "de_DE.UTF-8"
    assert env["X"] == "1"
    assert "/usr/bin" in env["PATH"]


def test_capabilities_are_few_and_not_inherited() -> None:
    capabilities = made()["process"]["capabilities"]
    assert set(capabilities) == {"bounding", "effective", "permitted"}
    assert "CAP_SYS_ADMIN" not in capabilities["bounding"]
    assert len(capabilities["bounding"]) == 14


def test_limits_say_no_swap_where_the_kernel_can() -> None:
    resources = Resources(cpu=0.5, memory_mb=64, pids=10)
    assert limits(resources, swap_limit=True)["memory"] == {"limit": 64 << 20, "swap": 64 << 20}
    assert limits(resources, swap_limit=False)["memory"] == {"limit": 64 << 20}
    assert limits(resources, swap_limit=False)["cpu"] == {"quota": 50000, "period": 100000}
    assert limits(resources, swap_limit=False)["pids"] == {"limit": 10}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_dangerous_call_is_on_no_list(name: str) -> None:
    assert name not in ALLOWED


def test_what_is_not_allowed_is_eperm_and_clone3_enosys() -> None:
    seccomp = profile("x86_64")
    assert (seccomp["defaultAction"], seccomp["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", 1)
    rules = {rule["names"][0]: rule for rule in seccomp["syscalls"] if len(rule["names"]) == 1}
    assert rules["clone3"]["errnoRet"] == 38
    assert rules["clone"]["args"][0]["value"] & 0x10000000  # CLONE_NEWUSER
    assert len(ALLOWED) == len(set(ALLOWED))


@pytest.mark.parametrize(("machine", "native"), [("x86_64", "SCMP_ARCH_X86_64"), ("aarch64", "SCMP_ARCH_AARCH64")])
def test_the_machine_s_own_architecture_comes_first(machine: str, native: str) -> None:
    assert profile(machine)["architectures"][0] == native
