"""Starts, finds and stops a deployment on a running Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import msgspec

from rollout_sched.config import load_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray.deployment import (
    CALLS_AT_ONCE,
    FOR_EVER,
    NAMESPACE,
    Deployment,
    PolicyText,
    scheduler_placement,
)
from rollout_sched.integrations.ray.scheduler_actor import SchedulerActor, SchedulerFacts
from rollout_sched.process import install_extra

log = logging.getLogger(__name__)


def connect(address: str | None = None) -> None:
    """Connect to the cluster at `address`, unless this process is already connected. None means the
    cluster of this machine. Raises CallerError if there is no cluster."""
    try:
        import ray
    except ImportError as error:
        raise CallerError(f"{error}; on every node: {install_extra('ray')}") from error
    if ray.is_initialized():
        return
    try:
        ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False)
    except ConnectionError as error:
        raise CallerError(
            f"no Ray cluster at {address or 'this machine'}: {error}; start one with "
            "`ray start --head`"
        ) from error


async def start(options: Options, deployment: Deployment) -> SchedulerFacts:
    """Start the deployment; one that exists stays unchanged. Raises CallerError if it cannot start;
    then nothing is left behind."""
    import ray

    # A wrong policy is reported here, before anything is started.
    load_policy(options.policy, allow_code=options.allow_code)
    actor = await found(deployment)
    if actor is not None:
        log.warning("deployment %s already exists and is left unchanged", deployment.name)
        return await facts(actor)
    actor = await asyncio.to_thread(_make, options, deployment)
    try:
        return await facts(actor)
    except CallerError:
        ray.kill(actor)
        raise


async def found(deployment: Deployment) -> Any:
    """The scheduler's actor, or None."""
    import ray

    try:
        return await asyncio.to_thread(ray.get_actor, deployment.scheduler, NAMESPACE)
    except ValueError:
        return None


async def facts(actor: Any) -> SchedulerFacts:
    """Waits until the actor has started. Raises CallerError."""
    import ray

    try:
        told: SchedulerFacts = await actor.started.remote()
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, CallerError):
            raise error.cause from None
        raise CallerError(f"the scheduler cannot start: {error.cause}") from error
    except ray.exceptions.RayError as error:
        raise CallerError(f"the scheduler cannot start: {error}") from error
    return told


async def stop(deployment: Deployment) -> bool:
    """Stop the deployment permanently, including fronts whose scheduler is gone. Returns False if
    nothing was running. The store is kept."""
    import ray

    actor = await found(deployment)
    if actor is not None:
        try:
            await actor.close.remote()
        except ray.exceptions.RayError as error:
            log.warning("the scheduler did not stop cleanly and is killed: %s", error)
        await asyncio.to_thread(ray.kill, actor)
    left = await asyncio.to_thread(_kill_fronts, deployment)
    return actor is not None or left > 0


def _kill_fronts(deployment: Deployment) -> int:
    """Kill the fronts that are left, whichever process started them. Returns how many."""
    import ray
    from ray.util import list_named_actors

    prefix, left = deployment.front(""), 0
    for actor in list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix):
            with contextlib.suppress(ValueError):  # it has just ended
                ray.kill(ray.get_actor(actor["name"], NAMESPACE))
                left += 1
    return left


def _make(options: Options, deployment: Deployment) -> Any:
    import ray

    actor = ray.remote(SchedulerActor).options(
        name=deployment.scheduler,
        namespace=NAMESPACE,
        get_if_exists=True,  # another process may have started it first
        lifetime="detached",
        max_restarts=FOR_EVER,
        max_concurrency=CALLS_AT_ONCE,
        num_cpus=0,
        scheduling_strategy=scheduler_placement(deployment, stored=options.store is not None),
    )
    return actor.remote(_absolute(options), deployment, PolicyText.read(options.policy))


def _absolute(options: Options) -> Options:
    """The options with absolute paths: an actor's working directory belongs to Ray."""
    paths = {
        name: value.absolute()
        for name, value in msgspec.structs.asdict(options).items()
        if isinstance(value, Path)
    }
    roots = [root.absolute() for root in options.weights_roots]
    return msgspec.structs.replace(options, **paths, weights_roots=roots)
