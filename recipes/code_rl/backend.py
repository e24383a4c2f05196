"""Where the programs run: the env and the verifier of the back end that `CODE_RL_BACKEND` names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sandyard.connection import Connection
from sandyard.envs.backends import Backend, load_backend
from sandyard.envs.base import Env
from sandyard.envs.lease import SandboxLease
from sandyard.train.config import TrainConfig
from sandyard.verify.base import Verifier
from sandyard.verify.code import CodeVerifier, SandboxLauncher
from sandyard.verify.local import local_verifier

from .config import RecipeConfig

TEMPLATE = "base"


@dataclass(frozen=True)
class Yard:
    """`capacity` is how many sandboxes there is room for, None where nothing limits them."""

    backend: Backend
    make_env: Callable[[], Env]
    verifier: Verifier
    capacity: int | None


@asynccontextmanager
async def open_yard(config: RecipeConfig, train: TrainConfig, server: Connection) -> AsyncIterator[Yard]:
    """Everything acquired here is gone when the context ends, or within the lease if this process dies."""
    backend = load_backend()
    seconds = train.deadlines.exec
    if backend.NAME != "sandbox":
        verifier = _local_verifier(backend.NAME)
        try:
            yield Yard(backend, lambda: backend.make_env(run_timeout=seconds), verifier, None)
        finally:
            await verifier.close()
        return
    lifetime = train.deadlines.rollout + train.deadlines.step
    warm = {TEMPLATE: min(config.warm_sandboxes, train.rollouts)} if config.warm_sandboxes else {}
    async with SandboxLease(server, ttl=config.lease_seconds, labels={"recipe": "code_rl"}, warm=warm) as lease:
        yield Yard(
            backend,
            lambda: backend.make_env(template=TEMPLATE, run_timeout=seconds, lease=lease, sandbox_timeout=lifetime),
            CodeVerifier(SandboxLauncher(server, template=TEMPLATE, lease=lease)),
            (await lease.capacity()).max_sandboxes,
        )


def _local_verifier(backend: str) -> Verifier:
    """The one that executes solutions as the policy's programs were executed."""
    if backend == "process":
        from sandyard.verify.process import ProcessVerifier

        return ProcessVerifier()
    if backend == "interpreter":
        from sandyard.verify.interpreter import InterpreterVerifier

        return InterpreterVerifier()
    return local_verifier()
