"""A trainer's calls to the scheduler's actor, over Ray."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from rollout_sched.core.model.errors import CallerError, RolloutError
from rollout_sched.integrations.gateway.control_plane import (
    STATE,
    GatewayError,
    NextBatch,
    TrainerCalls,
    error_of,
)
from rollout_sched.integrations.ray.deployment import NAMESPACE, Deployment
from rollout_sched.integrations.ray.scheduler_actor import HandedBatch

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
        try:
            self.actor = await self._found()
        except ValueError:
            raise CallerError(
                f"no deployment {self._deployment!r} on this cluster; start it with "
                f"`rollout-sched ray up --policy P --name {self._deployment}`, or pass a policy to "
                "on_ray"
            ) from None

    async def _found(self) -> Any:
        """Raises ValueError."""
        import ray

        name = Deployment(name=self._deployment).scheduler
        return await asyncio.to_thread(ray.get_actor, name, NAMESPACE)

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
            with contextlib.suppress(ValueError):  # the deployment may have been started again
                self.actor = await self._found()
            raise GatewayError(f"{self.name}: {error}") from error
        except ray.exceptions.RayError as error:
            raise GatewayError(f"{self.name}: {error}") from error
