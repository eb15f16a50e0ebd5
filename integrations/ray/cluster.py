"""A deployment on a cluster that is there: started, found and stopped."""

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

log = logging.getLogger(__name__)


def connect(address: str | None = None) -> None:
    """To the cluster at `address`, unless this process is connected already; None: the one of this
    machine. Raises CallerError if there is none."""
    try:
        import ray
    except ImportError as error:
        raise CallerError(f"this needs the extra ray, rollout-sched[ray]: {error}") from error
    if ray.is_initialized():
        return
    try:
        ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False)
    except ConnectionError as error:
        raise CallerError(
            f"no Ray cluster at {address or 'this machine'}: {error}; start one by "
            "`ray start --head`"
        ) from error


async def start(options: Options, deployment: Deployment) -> SchedulerFacts:
    """The deployment, which is made unless it is there: then it stays as it is. Raises CallerError
    for what keeps it from starting; nothing stays then."""
    import ray

    load_policy(options.policy)  # what is wrong with it is said here, and nothing is made
    actor = await found(deployment)
    if actor is not None:
        log.warning("deployment %s is there already, and stays as it is", deployment.name)
        return await facts(actor)
    actor = await asyncio.to_thread(_make, options, deployment)
    try:
        return await facts(actor)
    except CallerError:
        ray.kill(actor)
        raise


async def found(deployment: Deployment) -> Any:
    """The scheduler's actor; None if there is none."""
    import ray

    try:
        return await asyncio.to_thread(ray.get_actor, deployment.scheduler, NAMESPACE)
    except ValueError:
        return None


async def facts(actor: Any) -> SchedulerFacts:
    """Once it has started. Raises CallerError."""
    import ray

    try:
        told: SchedulerFacts = await actor.started.remote()
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, CallerError):
            raise error.cause from None
        raise CallerError(f"the scheduler does not start: {error.cause}") from error
    except ray.exceptions.RayError as error:
        raise CallerError(f"the scheduler does not start: {error}") from error
    return told


async def stop(deployment: Deployment) -> bool:
    """For good, with fronts whose scheduler is gone; False if nothing was there. The store
    stays."""
    import ray

    actor = await found(deployment)
    if actor is not None:
        try:
            await actor.close.remote()
        except ray.exceptions.RayError as error:
            log.warning("the scheduler has not stopped by itself: %s", error)
        await asyncio.to_thread(ray.kill, actor)
    left = await asyncio.to_thread(_kill_fronts, deployment)
    return actor is not None or left > 0


def _kill_fronts(deployment: Deployment) -> int:
    """Those that are still there, whoever has started them: how many."""
    import ray
    from ray.util import list_named_actors

    prefix, left = deployment.front(""), 0
    for actor in list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix):
            with contextlib.suppress(ValueError):  # it has just gone
                ray.kill(ray.get_actor(actor["name"], NAMESPACE))
                left += 1
    return left


def _make(options: Options, deployment: Deployment) -> Any:
    import ray

    actor = ray.remote(SchedulerActor).options(
        name=deployment.scheduler,
        namespace=NAMESPACE,
        get_if_exists=True,  # somebody else may have been quicker
        lifetime="detached",
        max_restarts=FOR_EVER,
        max_concurrency=CALLS_AT_ONCE,
        num_cpus=0,
        scheduling_strategy=scheduler_placement(deployment, stored=options.store is not None),
    )
    return actor.remote(_absolute(options), deployment, PolicyText.of(options.policy))


def _absolute(options: Options) -> Options:
    """An actor works in a folder of Ray's."""
    paths = {
        name: value.absolute()
        for name, value in msgspec.structs.asdict(options).items()
        if isinstance(value, Path)
    }
    roots = [root.absolute() for root in options.weights_roots]
    return msgspec.structs.replace(options, **paths, weights_roots=roots)
