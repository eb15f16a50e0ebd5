"""The trainer's client of a deployment on a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from rollout_sched.client.remote import (
    LONG_POLL_S,
    STATE,
    GatewayError,
    NextBatch,
    Remote,
    TrainerCalls,
    error_of,
)
from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray import cluster
from rollout_sched.integrations.ray.deployment import NAME, Deployment, FrontCount
from rollout_sched.integrations.ray.scheduler_actor import HandedBatch
from rollout_sched.live.trainer import TRAINER
from rollout_sched.live.trainer.samples import Batch

#: Seconds without an answer after which the call is repeated: far longer than the actor holds any
#: call.
ANSWER_S = 120.0


class ActorCalls(TrainerCalls):
    """Calls to the scheduler of an existing deployment. Initialise Ray before `open`."""

    def __init__(self, deployment: str) -> None:
        super().__init__(f"the scheduler of deployment {deployment!r}")
        self._deployment = deployment
        self.actor: Any = None

    async def open(self) -> None:
        """Raises CallerError if there is no such deployment."""
        self.actor = await self._found()
        if self.actor is None:
            raise CallerError(
                f"no deployment {self._deployment!r} on this cluster; start it with "
                f"`rollout-sched ray up --policy P --name {self._deployment}`, or pass a policy to "
                "on_ray"
            )

    async def _found(self) -> Any:
        return await cluster.found(Deployment(name=self._deployment))

    async def close(self) -> None:
        """Does nothing: the actor keeps running."""

    async def greet(self) -> dict[str, Any]:
        _, body = await self.send("GET", STATE, repeatable=True)
        return msgspec.msgpack.decode(body, type=dict[str, Any])

    async def once(self, method: str, path: str, data: bytes) -> tuple[int, bytes]:
        status, body, epoch = await self._answer(
            self.actor.call.remote(method, path, data, self.epoch)
        )
        self.epoch = epoch or self.epoch
        if status >= 300:
            raise error_of(f"{self.name}, {path},", status, body)
        return status, body

    async def micro_batches(self, asked: NextBatch, count: int) -> tuple[HandedBatch, list[Any]]:
        """The answer, and references to the micro-batches, which this process owns."""
        return await self.repeated(lambda: self._micro_batches(asked, count))

    async def _micro_batches(self, asked: NextBatch, count: int) -> tuple[HandedBatch, list[Any]]:
        call = self.actor.micro_batches.options(num_returns=1 + count)
        head, *refs = call.remote(asked, self.epoch, count)
        handed = msgspec.msgpack.decode(await self._answer(head), type=HandedBatch)
        self.epoch = handed.epoch
        return handed, refs

    async def _answer(self, call: Any) -> Any:
        """The result of a call. Raises GatewayError while the actor is unreachable, and the actor's
        own RolloutError, such as CallerError if it cannot start."""
        import ray

        try:
            async with asyncio.timeout(ANSWER_S):
                return await call
        except TimeoutError:
            raise GatewayError(f"{self.name} has not answered for {ANSWER_S:g} s") from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RolloutError):
                raise error.cause from None
            raise GatewayError(f"{self.name}: {error.cause!r}") from error
        except ray.exceptions.ActorDiedError as error:
            # The deployment may have been started again.
            self.actor = await self._found() or self.actor
            raise GatewayError(f"{self.name}: {error}") from error
        except ray.exceptions.RayError as error:
            raise GatewayError(f"{self.name}: {error}") from error


class MicroBatches(NamedTuple):
    """batch  the batch's metadata, without its samples
    refs   an object reference for each micro-batch (`integrations.token_columns.micro_batches`)
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
    policy: str | Path | None = None,
    instances: Sequence[str] = (),
    *,
    name: str = NAME,
    fronts: FrontCount = "per-node",
    servers: str = "",
    serve_apps: str = "",
    shared_store: bool = False,
    address: str | None = None,
    trainer: str = TRAINER,
    **options: Any,
) -> OnRay:
    """Use the deployment `name` on a Ray cluster, as `rollout-sched ray up` starts it. With a
    `policy`, the deployment is started if it does not exist; it stays up afterwards.

    instances     URLs of vLLM servers
    fronts        "per-node", or a number (`ray.deployment`)
    servers       pattern for the names of actors that are vLLM servers
    serve_apps    pattern for Ray Serve applications whose replicas are vLLM servers
    shared_store  whether every node has the folder `store`
    address       of the cluster; None: the one that this process is connected to, else the one
                  on this machine
    options       those of `rollout-sched serve`: prompts_per_step, store, endpoints, ...

    Its `next_micro_batches` returns object references to arrays. Raises CallerError.
    """
    deployment = Deployment(
        name=name,
        fronts=fronts,
        servers=servers,
        serve_apps=serve_apps,
        shared_store=shared_store,
    )
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
    start = Options(policy=str(policy), instances=list(instances), **options)
    return OnRay(deployment, start, address, trainer)
