"""The registry of conformance checks and what runs them."""

from __future__ import annotations

import asyncio
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from sandyard.errors import SandyardError
from sandyard.runtimes.base import Capabilities, Instance, Rootfs, Runtime, SandboxSpec
from sandyard.runtimes.conformance.kit import PACE, Kit, patience

CHECK_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Check:
    """`own`: it harms its sandbox and gets one of its own. `needs`: the capability it is about."""

    name: str
    run: Callable[[Kit], Awaitable[None]]
    own: bool = False
    needs: str | None = None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`ok` is None where the runtime does not declare the capability."""

    name: str
    ok: bool | None
    detail: str
    seconds: float


CHECKS: list[Check] = []
_Body = Callable[[Kit], Awaitable[None]]


def check(name: str, *, own: bool = False, needs: str | None = None) -> Callable[[_Body], _Body]:
    """Register a check under a name that says what must be true."""

    def register(body: _Body) -> _Body:
        if any(other.name == name for other in CHECKS):
            raise ValueError(f"two conformance checks are named {name!r}")
        CHECKS.append(Check(name, body, own, needs))
        return body

    return register


async def run_conformance(
    runtime: Runtime,
    rootfs: Rootfs,
    *,
    on_result: Callable[[CheckResult], None] = lambda result: None,
    only: Sequence[str] | None = None,
) -> list[CheckResult]:
    """Run every check (or those whose name contains one of `only`) and tell each result as it comes.

    `rootfs` is the base template's, or one with bash, Python 3, sudo and user `user`. Failures are
    results, not exceptions; every sandbox made is destroyed.
    """
    await runtime.probe()
    PACE.set(runtime.pace)
    shared = _Shared(runtime, rootfs)
    results: list[CheckResult] = []
    try:
        for each in CHECKS:
            if only is None or any(part in each.name for part in only):
                result = await _run_one(each, runtime, rootfs, shared)
                results.append(result)
                on_result(result)
    finally:
        await shared.destroy()
    return results


def summary(results: Sequence[CheckResult]) -> str:
    """`N passed, M failed`, and how many do not apply."""
    passed = sum(result.ok is True for result in results)
    failed = sum(result.ok is False for result in results)
    skipped = len(results) - passed - failed
    return f"{passed} passed, {failed} failed" + (f", {skipped} not applicable" if skipped else "")


class _Shared:
    """The sandbox that most checks share; a new one if a check broke it."""

    def __init__(self, runtime: Runtime, rootfs: Rootfs) -> None:
        self._runtime = runtime
        self._rootfs = rootfs
        self._instance: Instance | None = None

    async def get(self) -> Instance:
        if self._instance is not None:
            try:
                await self._instance.agent.hello()
            except SandyardError:
                await self.destroy()
        if self._instance is None:
            spec = SandboxSpec(f"shared{secrets.token_hex(6)}", self._rootfs)
            self._instance = await self._runtime.create(spec)
        return self._instance

    async def destroy(self) -> None:
        if self._instance is not None:
            sandbox_id = self._instance.spec.sandbox_id
            self._instance = None
            await self._runtime.destroy(sandbox_id)


async def _run_one(each: Check, runtime: Runtime, rootfs: Rootfs, shared: _Shared) -> CheckResult:
    began = time.monotonic()

    def result(ok: bool | None, detail: str = "") -> CheckResult:
        return CheckResult(each.name, ok, detail, time.monotonic() - began)

    if each.needs is not None and not _has(runtime.capabilities, each.needs):
        return result(None, f"the runtime does not declare {each.needs}")
    made: list[str] = []
    try:
        async with asyncio.timeout(patience(CHECK_TIMEOUT)):
            kit = Kit(runtime, rootfs, await shared.get(), made)
            if each.own:
                kit.sandbox = await kit.make()
            await each.run(kit)
    except TimeoutError:
        return result(False, f"not done within {patience(CHECK_TIMEOUT):.0f} s")
    except Exception as error:  # noqa: BLE001 — whatever a check raises is its result
        where = traceback.extract_tb(error.__traceback__)[-1]
        return result(False, f"{error or type(error).__name__} ({where.name}:{where.lineno})")
    finally:
        for sandbox_id in made:
            await runtime.destroy(sandbox_id)
    return result(True)


def _has(capabilities: Capabilities, name: str) -> bool:
    return bool(getattr(capabilities, name))
