"""The client of a deployment on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from rollout_sched.client.remote import LONG_POLL_S, Remote
from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.gateway.control_plane import GatewayError, NextBatch
from rollout_sched.integrations.gateway.control_plane.weights import WeightUpdate
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray import cluster
from rollout_sched.integrations.ray.actor_calls import ActorCalls
from rollout_sched.integrations.ray.deployment import Deployment
from rollout_sched.live.trainer.samples import Batch


class MicroBatches(NamedTuple):
    """batch  the batch's metadata, without its samples
    refs   an object reference for each micro-batch (`integrations.ray.micro_batches`)
    """

    batch: Batch
    refs: Sequence[Any]


class OnRay(Remote):
    """Like `Remote`, with calls to an actor instead of a gateway. With `start`, the deployment is
    created if none of its name exists; it stays up when this client closes."""

    def __init__(
        self, deployment: Deployment, start: Options | None, address: str | None, trainer: str
    ) -> None:
        self._calls = ActorCalls(deployment.name)
        calls = iter((self._calls, ActorCalls(deployment.name)))
        super().__init__(lambda: next(calls), trainer)
        self._deployment = deployment
        self._start = start
        self._address = address

    async def __aenter__(self) -> Self:
        cluster.connect(self._address)
        if self._start is not None:
            await cluster.start(self._start, self._deployment)
        return await super().__aenter__()

    async def _tell_of(self, update: WeightUpdate) -> None:
        """Repeats the call if the actor was restarted and does not know the update."""
        try:
            await super()._tell_of(update)
        except GatewayError as error:
            if error.status:
                raise
            if (await self.state())["version"] < update.version:
                await super()._tell_of(update)

    async def next_micro_batches(self, count: int, *, parts: bool = False) -> MicroBatches | None:
        """Like `next_batch`, but divided into `count` micro-batches for the workers that train
        them. A worker that gets a reference reads the arrays, without a copy on the scheduler's
        node. This process owns the references; if their node is gone, ask again."""
        if count < 1:
            raise CallerError(f"a batch needs at least one micro-batch, not {count}")
        async with self._waiting_for_batch():
            while True:
                number, part = self._received
                asked = NextBatch(self._trainer, number, part, parts, LONG_POLL_S)
                head, refs = await self._calls.micro_batches(asked, count)
                if head.epoch != self._epoch:
                    await self._go_on_with_another()
                    continue
                if head.status == "nothing":
                    return None
                if head.batch is not None:
                    self._received = head.batch.number, head.batch.part
                    self._submitted.remove(head.uids)
                    return MicroBatches(head.batch, refs)


def on_ray(
    deployment: Deployment,
    policy: str | Path | None,
    instances: list[str],
    options: dict[str, Any],
    address: str | None,
    trainer: str,
) -> OnRay:
    """See `RolloutScheduler.on_ray`. Raises CallerError."""
    if policy is None:
        given = [*options, *(["instances"] if instances else [])]
        if given:
            raise CallerError(
                f"{', '.join(given)}: only for a deployment that is started here; give a policy too"
            )
        return OnRay(deployment, None, address, trainer)
    known = {field.name for field in msgspec.structs.fields(Options)}
    for name in options:
        if name not in known:
            raise CallerError(f"on_ray has no option {name!r}; see `rollout-sched serve --help`")
    start = Options(policy=str(policy), instances=instances, **options)
    return OnRay(deployment, start, address, trainer)
