"""Where the programs run: the env and the verifier of the back end that `CODE_RL_BACKEND` names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sandyard.connection import Connection
from sandyard.envs.backends import Backend, load_backend
from sandyard.envs.base import Env
from sandyard.envs.factory import EnvFactory
from sandyard.envs.lease import SandboxLease
from sandyard.envs.pool.shard import refuse_elsewhere
from sandyard.envs.sandbox import SandboxEnv
from sandyard.train.config import TrainConfig
from sandyard.train.pooling import pooled_envs
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
    if backend.NAME != "sandbox":
        verifier = _local_verifier(backend.NAME)
        try:
            async with _local_envs(backend, train) as make_env:
                yield Yard(backend, make_env, verifier, None)
        finally:
            await verifier.close()
        return
    if train.env_remote:
        refuse_elsewhere(SandboxEnv)
    options = {"template": TEMPLATE, "run_timeout": train.deadlines.exec}
    lifetime = train.deadlines.rollout + train.deadlines.step
    warm = {TEMPLATE: min(config.warm_sandboxes, train.rollouts)} if config.warm_sandboxes else {}
    async with SandboxLease(server, ttl=config.lease_seconds, labels={"recipe": "code_rl"}, warm=warm) as lease:
        yield Yard(
            backend,
            lambda: backend.make_env(lease=lease, sandbox_timeout=lifetime, **options),
            CodeVerifier(SandboxLauncher(server, template=TEMPLATE, lease=lease)),
            (await lease.capacity()).max_sandboxes,
        )


@asynccontextmanager
async def _local_envs(backend: Backend, train: TrainConfig) -> AsyncIterator[Callable[[], Env]]:
    """Envs in this process; with `ENV_REMOTE=1` over Ray's."""
    options = {"run_timeout": train.deadlines.exec}
    if not train.env_remote:
        yield lambda: backend.make_env(**options)
        return
    async with pooled_envs(EnvFactory.of(backend.make_env, **options), train) as make_env:
        yield make_env


def _local_verifier(backend: str) -> Verifier:
    """The one that executes solutions as the policy's programs were executed."""
    if backend == "process":
        from sandyard.verify.process import ProcessVerifier

        return ProcessVerifier()
    if backend == "interpreter":
        from sandyard.verify.interpreter import InterpreterVerifier

        return InterpreterVerifier()
    return local_verifier()
