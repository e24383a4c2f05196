"""The making of one microVM on the host, up to the moment its VMM runs. Blocking."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import CreateFailed, SandboxError
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.container.cgroups import Cgroups
from sandyard.runtimes.container.layout import remove_tree
from sandyard.runtimes.microvm import conf
from sandyard.runtimes.microvm.cgroup import make_groups
from sandyard.runtimes.microvm.choice import Choice
from sandyard.runtimes.microvm.disks import KEPT, Disks
from sandyard.runtimes.microvm.images import image_of
from sandyard.runtimes.microvm.kind import Kind, booted
from sandyard.runtimes.microvm.launch import SHARED, VmStart, listen, start_vmm
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.machine import Drive
from sandyard.runtimes.microvm.memory.image import chain_of, is_blank
from sandyard.runtimes.microvm.qcow2 import Image
from sandyard.runtimes.microvm.record import save_below, save_running
from sandyard.runtimes.microvm.users import give_home, make_home

LAYER_FILES_MAX = 16
CONF = "conf.img"
_CONF_DRIVE = Drive("conf", SHARED / KEPT / CONF, "raw")


class Starter:
    """Starts VMMs by `settings` in `layout`."""

    def __init__(self, settings: Settings, layout: Layout, cgroups: Cgroups) -> None:
        self._settings = settings
        self._layout = layout
        self._cgroups = cgroups

    def start(self, choice: Choice, spec: SandboxSpec, *, used: bool, tap: bool = False) -> int:
        """Make disk, groups and sockets and start the VMM; its pid. `used`: on the disk it had. `tap`: with an
        interface, whether it has a network or not.

        Raises `CreateFailed` naming the stage; what was made until then is left for `destroy`."""
        directories, files = split_layers(spec.rootfs.layers)
        layout, disks, block = self._layout, Disks(self._layout, spec), self._layout.block(spec.sandbox_id)
        base = image_of(directories, layout.images, layout.uid_base)
        try:
            block.parent.mkdir(mode=0o700, exist_ok=True)
            block.unlink(missing_ok=True)
            os.link(base, block)
            content = conf.configuration(spec, len(files), self._settings.network.subnet, used=used)
            if not used:
                self.make_own(spec.sandbox_id)
            disks.prepare()
            disks.sweep()
            disks.prune(ended=True)
            if not disks.writable():
                disks.add()
            write_conf(disks.kept, content)
            drives, shared = self.drives(spec)
        except (SandboxError, OSError) as error:
            raise CreateFailed("disk", str(error)) from error
        except ValueError as error:
            raise CreateFailed("spec", str(error)) from error
        return self._run(self.kind(choice, spec, tap=tap), spec, drives, {**booted(choice.assets), **shared})

    def start_incoming(
        self, choice: Choice, spec: SandboxSpec, memory: str, blank_conf: int, descriptors: Sequence[int]
    ) -> int:
        """Start the VMM of a sandbox whose disk is there and whose memory and devices, of its image `memory`, are to
        be given to it, with `descriptors` open to that end; its pid. `blank_conf`: bytes of the disk that its guest
        read at its boot.

        Raises `CreateFailed`; what was made until then is left."""
        try:
            write_conf(self._layout.kept(spec.sandbox_id), bytes(blank_conf))
            remove_tree(self._layout.given(spec.sandbox_id))  # of the VMM it had before
            drives, shared = self.drives(spec)
        except (SandboxError, OSError) as error:
            raise CreateFailed("disk", str(error)) from error
        return self._run(self.kind(choice, spec), spec, drives, shared, memory, descriptors)

    def start_probe(self, choice: Choice, sandbox_id: str, layer: Path) -> int:
        """Start a guest that mounts nothing and answers; its pid."""
        self.make_own(sandbox_id)
        spec = SandboxSpec(sandbox_id, Rootfs([layer]), Resources(memory_mb=64))
        disks = Disks(self._layout, spec)
        disks.prepare()
        write_conf(disks.kept, conf.PROBE)
        return self._run(self.kind(choice, spec), spec, [_CONF_DRIVE], {**booted(choice.assets), KEPT: disks.kept})

    def kind(self, choice: Choice, spec: SandboxSpec, *, tap: bool = False) -> Kind:
        """Of the VMM of such a sandbox."""
        files, network = committed(spec.rootfs.layers), tap or spec.network is not None
        own, cpu = self._settings.microvm, spec.resources.cpu
        memory_mb, disk_mb = self.memory_mb(spec), spec.resources.disk_mb
        return Kind(choice.engine, choice.accel, memory_mb, disk_mb, own.overhead_mb, cpu, network, len(files))

    def drives(self, spec: SandboxSpec) -> tuple[list[Drive], dict[str, Path]]:
        """Of a guest on its disk and its committed layers; and, by names below `SHARED`, what its VMM gets to see of
        the host's files and directories. Raises `SandboxError`."""
        disks = Disks(self._layout, spec)
        *below, top = disks.images()
        shared = {"base": self._layout.block(spec.sandbox_id), KEPT: disks.kept}
        drives = [_CONF_DRIVE, Drive("base", SHARED / "base", "raw")]
        drives.append(Drive("disk", top.path, "qcow2", writable=True, below=below))
        for number, layer in enumerate(committed(spec.rootfs.layers)):
            images = []
            for place, path in enumerate(chain_of(layer)):
                name = f"layer{number}-{place}"
                shared[name] = path
                images.append(Image(SHARED / name, "raw" if is_blank(path, layer) else "qcow2"))
            drives.append(Drive(f"layer{number}", images[-1].path, "qcow2", below=images[:-1]))
        return drives, shared

    def gate(self) -> str:
        """The address of the host's end of a sandbox's interface."""
        subnet = self._settings.network.subnet
        return f"{subnet[1]}/{subnet.prefixlen}"

    def plan(self, kind: Kind, spec: SandboxSpec, groups: Sequence[Path], shared: dict[str, Path]) -> VmStart:
        """What its VMM is confined to, which its images belong to from here on. Raises `OSError`."""
        sandbox_id = spec.sandbox_id
        own, uid = self._layout.disk(sandbox_id), self._layout.uid(sandbox_id)
        give_home(own, uid)  # also one that is of an earlier version
        Disks(self._layout, spec).hand_to(uid)
        return VmStart(
            own=own,
            uid=uid,
            groups=groups,
            shared=shared,
            log=self._layout.home(sandbox_id) / "vmm.log",
            file_bytes=kind.file_bytes,
            device=kind.device,
            network=spec.network,
            gate=self.gate() if kind.tap else "",
        )

    def memory_mb(self, spec: SandboxSpec) -> int:
        """The RAM of its guest."""
        return spec.resources.memory_mb + self._settings.microvm.guest_mb

    def make_own(self, sandbox_id: str) -> None:
        """Make the directory of its VMM, which gets a user of its own. Raises `CreateFailed`."""
        make_home(self._layout, self._layout.disk(sandbox_id))

    def _run(
        self,
        kind: Kind,
        spec: SandboxSpec,
        disks: Sequence[Drive],
        shared: dict[str, Path],
        memory: str = "",
        incoming: Sequence[int] = (),
    ) -> int:
        sandbox_id, home = spec.sandbox_id, self._layout.home(spec.sandbox_id)
        groups = make_groups(self._cgroups, sandbox_id, kind.limits)
        with ExitStack() as stack:
            try:
                home.mkdir(mode=0o700)
                save_below(home, memory)
                agent_fd = listen(stack, self._layout.agent_socket(sandbox_id))
                qmp_fd = listen(stack, self._layout.qmp_socket(sandbox_id))
                plan = self.plan(kind, spec, groups, shared)
            except OSError as error:
                raise CreateFailed("sockets", f"{home}: {error}") from error
            command = kind.machine(disks, agent_fd, qmp_fd, incoming=bool(incoming)).command()
            pid = start_vmm(plan, command, (agent_fd, qmp_fd, *incoming))
        save_running(home, spec, pid)
        return pid


def write_conf(home: Path, content: bytes) -> None:
    """Write the disk with a guest's configuration in the directory `home`. Raises `OSError`."""
    path = home / CONF
    path.unlink(missing_ok=True)
    with open(path, "xb") as file:
        file.write(content)
    path.chmod(0o444)


def committed(layers: Sequence[Path]) -> list[Path]:
    """Those that are files. What lies below them need not be there: a guest that goes on from memory has the block
    image that was made of it."""
    return list(itertools.takewhile(Path.is_file, layers))


def split_layers(layers: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Directories, and the files that lie above them. Raises `CreateFailed("rootfs")`."""
    files = committed(layers)
    directories = list(layers[len(files) :])
    for layer in directories:
        if not layer.is_dir():
            raise CreateFailed("rootfs", f"layer {layer} is no directory, and not above all that are")
    if not directories:
        raise CreateFailed("rootfs", "no layer is a directory: there is nothing to stand on")
    if len(files) > LAYER_FILES_MAX:
        raise CreateFailed("rootfs", f"{len(files)} committed layers, where {LAYER_FILES_MAX} are the most")
    return directories, files
