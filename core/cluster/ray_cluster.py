"""RayCluster: replicas as Ray actors. The only module that imports ray."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import ray

from graftlm.core.cluster.engine import Member, ReplicaEngine
from graftlm.core.cluster.replica import Event, Key, Replica
from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError, EngineError, GraftError
from graftlm.core.metrics import Stats
from graftlm.core.request import Request

if TYPE_CHECKING:
    from graftlm.core.text.tokenizer import Tokenizer

STATS_S = 10.0
KNOCK_S = 10.0

# Ray's annotations lack documented options.
_remote: Any = ray.remote
_cluster_resources: Any = ray.cluster_resources


def build_ray(
    model: Any, config: EngineConfig, *, tokenizer: Tokenizer, wake: Callable[[], None] = lambda: None
) -> ReplicaEngine:
    """Build an engine over `config.replicas` actors, each with its own runtime."""
    from graftlm.plugins import manager

    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            "engine='ray' loads the model in other processes; give its name or folder, not a loaded model"
        )
    if config.device.startswith("cuda:"):
        raise ConfigError(f"device is {config.device!r}; with engine='ray' Ray gives each replica its GPU, use 'cuda'")
    cluster = RayCluster(os.fspath(model), config)
    try:
        return ReplicaEngine(
            cluster,
            config.replicas,
            wake=wake,
            seed=config.seed,
            step_tokens=config.max_step_tokens,
            finished=manager.load().request_finished,
        )
    except BaseException:
        cluster.close()
        raise


build_ray.takes_constraints = False  # type: ignore[attr-defined]


class RayCluster:
    """A connection to Ray; an existing one is reused and left open."""

    def __init__(self, model: str, config: EngineConfig) -> None:
        self._model = model
        default = EngineConfig()
        changed = {f.name: getattr(config, f.name) for f in fields(EngineConfig)}
        self._options = {k: v for k, v in changed.items() if v != getattr(default, k) and k != "replicas"}
        self._options |= {"engine": "local", "quiet": True}
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            _connect(config.replicas)
        try:
            self._resources = _resources(config)
        except BaseException:
            self.close()
            raise

    def start(self, heard: Callable[[list[Event] | BaseException], None]) -> tuple[Member, dict[str, str]]:
        """Start an actor, load its model, and listen to it."""
        kind = _remote(max_restarts=0, max_concurrency=4096, max_pending_calls=16384, **self._resources)(Replica)
        actor = kind.remote(self._model, self._options)
        try:
            facts = ray.get(actor.load.remote())
        except ray.exceptions.RayError as error:
            ray.kill(actor)
            cause = getattr(error, "cause", None)
            if isinstance(cause, GraftError):
                raise cause from error
            raise EngineError(f"a replica could not be started: {error}") from error
        threading.Thread(target=_listen, args=(actor, heard), name="graftlm replica", daemon=True).start()
        return RayMember(actor, int(facts["pid"])), facts

    def close(self) -> None:
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()


class RayMember:
    """One actor. `pid` is its process, on its own node."""

    def __init__(self, actor: Any, pid: int) -> None:
        self.actor = actor
        self.pid = pid

    def add(self, requests: list[tuple[Key, Request]]) -> None:
        self.actor.add.remote(requests)

    def cancel(self, keys: list[Key]) -> None:
        self.actor.cancel.remote(keys)

    def stats(self) -> Stats:
        stats: Stats = ray.get(self.actor.stats.remote(), timeout=STATS_S)
        return stats

    def call(self, method: str, *arguments: Any) -> None:
        try:
            ray.get(getattr(self.actor, method).remote(*arguments))
        except ray.exceptions.ActorDiedError:
            return  # its listener reports the death

    def kill(self) -> None:
        ray.kill(self.actor)


def _listen(actor: Any, heard: Callable[[list[Event] | BaseException], None]) -> None:
    try:
        for reference in actor.events.remote():
            heard(ray.get(reference))
        heard(EngineError("the replica's events ended"))
    except BaseException as error:
        heard(error)


def _connect(num_replicas: int) -> None:
    """Join the cluster that RAY_ADDRESS names, else start a private Ray instance on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    common: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    try:
        if address:
            _knock(address)
            ray.init(address=address, **common)
        else:
            num_cpus = max(os.cpu_count() or 1, num_replicas)
            local: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 100 << 20}
            # "local": without an address, Ray would join a cluster that another process of this machine runs.
            ray.init(address="local", num_cpus=num_cpus, **local, **common)
    except Exception as error:
        where = f"the Ray cluster at {address}" if address else "Ray on this machine"
        raise ConfigError(
            f"{where} cannot be reached: {type(error).__name__}: {error}; it must run Ray {ray.__version__} and "
            "Python's version of this process, and a cluster with tokens needs RAY_AUTH_MODE=token and "
            "its own token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
        ) from error


def _knock(address: str) -> None:
    """Raise OSError if an address does not accept connections; Ray itself would retry for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()


def _resources(config: EngineConfig) -> dict[str, float]:
    """Return the resources of each actor; raise ConfigError if the cluster has fewer."""
    there = _cluster_resources()
    num_gpus, num_cpus, wanted = int(there.get("GPU", 0)), int(there.get("CPU", 0)), config.replicas
    each = config.tensor_parallel
    ranks = f" and tensor_parallel is {each}, which take {wanted * each}" if each > 1 else ""
    if config.device == "cpu" or (config.device == "auto" and not num_gpus):
        if num_cpus < wanted:
            raise ConfigError(f"replicas is {wanted}, the Ray cluster has {num_cpus} CPUs; ask for fewer")
        return {"num_cpus": num_cpus // wanted, "num_gpus": 0}
    if num_gpus < wanted * each:
        raise ConfigError(
            f"replicas is {wanted}{ranks}, the Ray cluster has {num_gpus} GPUs; ask for fewer, or device='cpu'"
        )
    return {"num_cpus": 1 if num_cpus >= wanted else 0, "num_gpus": each}
