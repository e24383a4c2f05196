"""The accelerator of this host, found out by booting a guest with each that may be used."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from dataclasses import replace

from sandyard.errors import HostError, SandboxError
from sandyard.runtimes.finishing import finish
from sandyard.runtimes.microvm.assets import Assets, load_assets, ready_assets
from sandyard.runtimes.microvm.bringup import BringUp
from sandyard.runtimes.microvm.choice import OLDEST, Choice, candidates, find_engine, remember, remembered, tried
from sandyard.runtimes.microvm.host import Host


async def choose(host: Host, bring_up: BringUp, before: Choice | None) -> Choice:
    """What works, as it was found out since the host booted, or now. `before`: what this process chose when QEMU or
    its assets were others. Raises `HostError`."""
    if os.geteuid() != 0:
        raise HostError("the microVM runtime needs root", remedy="run as root (sudo sandyard …)")
    host.layout.prepare()
    await asyncio.to_thread(host.cgroups.prepare)
    await host.spares.sweep()
    engine = await asyncio.to_thread(find_engine, host.settings)
    assets = await (ready_assets(host.settings) if before is None else asyncio.to_thread(_assets, host, before))
    allowed = candidates(host.settings)
    known = await asyncio.to_thread(remembered, host.layout, engine, assets, allowed)
    if known is not None:
        return Choice(engine, assets, *known)
    failures: list[str] = []
    for accel in allowed:
        try:
            choice = await _boots(host, bring_up, Choice(engine, assets, accel, 0.0))
        except SandboxError as error:
            failures.append(f"{accel}: {error.message}")
            continue
        await remember(host.layout, choice)
        return choice
    remedy = "set microvm.accel = auto: guests then run in software"
    if "tcg" in allowed:
        custom = host.settings.microvm.kernel is not None
        remedy = "look at microvm.kernel and microvm.modules" if custom else "run: sandyard setup microvm"
    if not tried(engine.version):
        remedy = f"QEMU {engine.version} is too old: install {'.'.join(map(str, OLDEST))} or later"
    raise HostError(f"no guest boots ({'; '.join(failures)})", remedy=remedy)


def _assets(host: Host, before: Choice) -> Assets:
    """What a server that runs is to use from now on: an agent of another version it may not understand."""
    found = load_assets(host.settings)
    return found if found.agent == before.assets.agent or not before.assets.initrd.is_file() else before.assets


async def _boots(host: Host, bring_up: BringUp, choice: Choice) -> Choice:
    """`choice` with the time a boot took. Raises `SandboxError`."""
    sandbox_id, began = f"probe{secrets.token_hex(6)}", time.monotonic()
    try:
        await bring_up.start_probe(choice, sandbox_id)
        return replace(choice, boot_seconds=time.monotonic() - began)
    finally:
        await finish(host.remove(sandbox_id))
