"""What a trainer holds: prompts in, batches out, new weights announced.

    async with RolloutScheduler.from_toml("tail_batching", ["http://127.0.0.1:8100"]) as rollouts:
        await rollouts.submit(prompts)
        async for batch in rollouts.batches():
            version = train(batch)
            await rollouts.publish_weights(version, Reload(f"/ckpt/{version}"))

`from_toml` schedules in this process, `connect` talks to a running `rollout-sched serve`; what is
written for one works with the other, but for weight loaders that are coroutines: those cannot
travel.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeGuard
from urllib.parse import quote

import msgspec

from rollout_sched.config import load_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.trainer_client import (
    GatewayError,
    TrainerClient,
)
from rollout_sched.integrations.gateway.control_plane.weight_update import (
    Reload,
    Transfer,
    WeightLoaders,
    WeightUpdate,
)
from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.ports import InstanceClient, WeightLoader
from rollout_sched.live.run_options import RunOptions
from rollout_sched.live.samples import Batch, FailedGroup, Prompt, Sample, Span
from rollout_sched.live.settings import Settings
from rollout_sched.live.trainer_session import Borrower
from rollout_sched.live.trajectory import Tool, Trajectory

__all__ = [
    "Applied",
    "Batch",
    "Borrower",
    "FailedGroup",
    "GatewayError",
    "Prompt",
    "Reload",
    "RolloutScheduler",
    "Sample",
    "Span",
    "Tool",
    "Trajectory",
    "Transfer",
]

#: Seconds that one question for a batch may take, and between two looks at the fleet's version.
LONG_POLL_S = 30.0
LOOK_S = 0.5

_DEFAULTS = RunOptions()

#: What has been received: the number of a batch, and of the last part of it.
Position = tuple[int | None, int | None]

_NOTHING: Position = (None, None)

#: Prompt tokens sent in one call.
PORTION_TOKENS = 2**20


class Applied(msgspec.Struct, frozen=True):
    """The trainer has loaded the weights into every instance itself."""


#: How an instance gets new weights: by description, or (in process) by a coroutine function
#: `apply(client, version)`.
Apply = Reload | Transfer | Applied | WeightLoader


class RolloutScheduler(ABC):
    """Prompts in, batches out; to be used as `async with`."""

    @staticmethod
    def from_toml(
        policy: str | Path,
        instances: Sequence[str | InstanceClient] = (),
        *,
        prompts_per_step: int = _DEFAULTS.prompts_per_step,
        version: int = _DEFAULTS.start_version,
        seed: int = _DEFAULTS.seed,
        stream_every: int = _DEFAULTS.stream_every,
        journal: Path | None = _DEFAULTS.journal,
        length_history: Path | None = _DEFAULTS.length_history,
        instance_api_key: str | None = None,
        settings: Settings | None = None,
        borrower: Borrower | None = None,
    ) -> RolloutScheduler:
        """Schedule in this process.

        policy            a TOML file, or the name of a preset
        instances         URLs of vLLM servers, or clients such as InProcessInstance; those that
                          are not up yet join later
        prompts_per_step  groups in a batch
        version           the trainer's version now
        stream_every      tokens between partial results, so that they survive an instance's death;
                          0 does not stream, which is faster
        journal           a new file to record every event in
        length_history    a file for the response lengths of prompts, kept from one run to the next
        settings          of the driver; None for the policy's [live] table
        borrower          the trainer, if it shares the instances' GPUs and begins on those that are
                          lent to it ([lending]) with the parts that it has

        Raises ConfigError.
        """
        loaded = load_policy(str(policy))
        options = RunOptions(
            prompts_per_step=prompts_per_step,
            start_version=version,
            seed=seed,
            stream_every=stream_every,
            journal=journal,
            length_history=length_history,
        )

        def start() -> LiveScheduler:
            return LiveScheduler(loaded, options, settings=settings, borrower=borrower)

        return _InProcess(start, instances, instance_api_key)

    @staticmethod
    def connect(url: str, *, admin_key: str | None = None) -> RolloutScheduler:
        """Use the gateway at `url`; without a key it must be on this machine.

        By its --admin-socket: unix:///path/of/the/socket.
        """
        return _Remote(url, admin_key)

    @abstractmethod
    async def submit(self, prompts: Iterable[Prompt], *, tool: Tool | None = None) -> None:
        """Queue groups. Raises CallerError at the first that cannot be; those before it stay.

        With a `tool`, a coroutine function, each sample is a trajectory of several turns: after
        each turn the tool is called with the `Trajectory` and returns the token ids that follow,
        or None when it is over. `max_tokens` bounds what is generated in all turns together. Only
        `from_toml` offers it: a coroutine cannot travel.
        """

    @abstractmethod
    async def close_submissions(self) -> None:
        """No more prompts will come: the last batches may be short, and `batches` ends."""

    @abstractmethod
    async def next_batch(self, *, parts: bool = False) -> Batch | None:
        """The next batch, waited for; None when submissions are closed and nothing is left.

        With `parts` what of it is whole, where the policy delivers in parts (`part_prompts`); it is
        asked for again until a part is the last. Without, all that has not been asked for in parts.
        """

    @abstractmethod
    async def publish_weights(self, version: int, apply: Apply, *, wait: bool = False) -> None:
        """Version `version` is ready; with `wait`, until every instance that is here, and at least
        one, computes with it.

        Raises CallerError if versions do not grow, or a checkpoint is not there.
        """

    @abstractmethod
    async def give_back(self, url: str) -> None:
        """The trainer uses an instance no longer that was lent to it (see `borrower`); to be said
        before the weights are published, so that all get them together. Raises CallerError if it
        is not lent, or was lost since. Only `from_toml` offers it."""

    @abstractmethod
    async def add_instance(self, instance: str | InstanceClient) -> None:
        """Take in a vLLM server that is up. Raises CallerError if it is here already,
        InstanceError or GatewayError if it does not answer."""

    @abstractmethod
    async def remove_instance(self, url: str, *, drain: bool = False) -> None:
        """Let an instance go; what it holds goes on elsewhere, or with `drain` is finished first.

        Over HTTP a drain goes on after this returns.
        """

    @abstractmethod
    async def state(self) -> dict[str, Any]:
        """Queues, versions and anomalies."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *error: object) -> None: ...

    async def batches(self) -> AsyncIterator[Batch]:
        """Batches until submissions are closed and nothing is left; may be left and taken up."""
        while (batch := await self.next_batch()) is not None:
            yield batch

    async def parts(self) -> AsyncIterator[Batch]:
        """The same batches as their groups become whole: accumulate gradients over the parts, and
        take the optimiser's step at the `last` one, before which no weights may be published."""
        while (part := await self.next_batch(parts=True)) is not None:
            yield part


class _InProcess(RolloutScheduler):
    """A driver of our own. `start` makes it once there is an event loop.

    A batch counts as received once the next one is asked for.
    """

    def __init__(
        self,
        start: Callable[[], LiveScheduler],
        instances: Sequence[str | InstanceClient],
        api_key: str | None,
    ) -> None:
        self._start = start
        self._instances = instances
        self._api_key = api_key
        self._received: Position
        self._live: LiveScheduler
        self._weight_loaders: WeightLoaders

    async def __aenter__(self) -> Self:
        self._received = _NOTHING
        self._live = self._start()
        self._weight_loaders = WeightLoaders(self._live.driver)
        try:
            await asyncio.gather(*(self._take_in(i, patient=True) for i in self._instances))
        except BaseException:
            await self._live.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._live.close()

    async def submit(self, prompts: Iterable[Prompt], *, tool: Tool | None = None) -> None:
        self._live.trainer.submit(prompts, tool)

    async def close_submissions(self) -> None:
        self._live.trainer.close_submissions()

    async def next_batch(self, *, parts: bool = False) -> Batch | None:
        number, part = self._received
        batch = await self._live.trainer.next_batch(number, part=part, parts=parts)
        if batch is not None:
            self._received = batch.number, batch.part
        return batch

    async def publish_weights(self, version: int, apply: Apply, *, wait: bool = False) -> None:
        loader = (
            apply
            if _is_coroutine(apply)
            else await self._weight_loaders.of(_update_of(version, apply))
        )
        await self._live.trainer.publish_weights(version, loader, wait=wait)

    async def give_back(self, url: str) -> None:
        self._live.trainer.give_back(url.rstrip("/"))

    async def add_instance(self, instance: str | InstanceClient) -> None:
        await self._take_in(instance, patient=False)

    async def remove_instance(self, url: str, *, drain: bool = False) -> None:
        await self._live.driver.remove_instance(url.rstrip("/"), drain=drain)

    async def state(self) -> dict[str, Any]:
        return self._live.state()

    async def _take_in(self, instance: str | InstanceClient, *, patient: bool) -> None:
        client: InstanceClient
        if isinstance(instance, str):
            client = HttpInstance(instance, api_key=self._api_key)
        else:
            client = instance
        await self._live.driver.add_instance(client, patient=patient)


class _Remote(RolloutScheduler):
    """A gateway does it. A batch counts as received once the next one is asked for."""

    def __init__(self, url: str, admin_key: str | None) -> None:
        self._gateway = TrainerClient(url, admin_key)
        self._received: Position = _NOTHING

    async def __aenter__(self) -> Self:
        await self._gateway.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._gateway.close()

    async def submit(self, prompts: Iterable[Prompt], *, tool: Tool | None = None) -> None:
        if tool is not None:
            raise CallerError(
                "a tool is a coroutine and cannot travel to a gateway; use from_toml, which "
                "schedules in this process"
            )
        for portion in _portions(prompts):
            await self._gateway.post("/rollout/v1/groups", portion)

    async def close_submissions(self) -> None:
        await self._gateway.post("/rollout/v1/groups/close")

    async def next_batch(self, *, parts: bool = False) -> Batch | None:
        while True:
            number, part = self._received
            asked = {"ack": number, "part": part, "parts": parts, "timeout_s": LONG_POLL_S}
            status, body = await self._gateway.post(
                "/rollout/v1/batches/next", asked, repeatable=True
            )
            if status == 204:
                return None
            if status == 200:
                batch = msgspec.msgpack.decode(body, type=Batch)
                self._received = batch.number, batch.part
                return batch

    async def publish_weights(self, version: int, apply: Apply, *, wait: bool = False) -> None:
        if _is_coroutine(apply):
            raise CallerError(
                "a coroutine cannot travel to a gateway; give Reload(path), Transfer(...), or "
                "load the weights yourself and give Applied()"
            )
        await self._gateway.post("/rollout/v1/weights", _update_of(version, apply))
        while wait and not (await self.state())["loaded"]:
            await asyncio.sleep(LOOK_S)

    async def give_back(self, url: str) -> None:
        raise CallerError(
            "a gateway lends no instances; use from_toml, which schedules in the trainer's process"
        )

    async def add_instance(self, instance: str | InstanceClient) -> None:
        if not isinstance(instance, str):
            raise CallerError("a gateway takes the URL of an instance, not a client")
        await self._gateway.post("/admin/instances", {"url": instance})

    async def remove_instance(self, url: str, *, drain: bool = False) -> None:
        path = f"/admin/instances/{quote(url, safe='')}"
        await self._gateway.send(*(("POST", f"{path}/drain") if drain else ("DELETE", path)))

    async def state(self) -> dict[str, Any]:
        _, body = await self._gateway.send("GET", "/rollout/v1/state", repeatable=True)
        state: dict[str, Any] = msgspec.msgpack.decode(body)
        return state


def _is_coroutine(apply: Apply) -> TypeGuard[WeightLoader]:
    return not isinstance(apply, Reload | Transfer | Applied)


def _update_of(version: int, apply: Apply) -> WeightUpdate:
    if isinstance(apply, Reload):
        return WeightUpdate(version, reload=apply)
    if isinstance(apply, Transfer):
        return WeightUpdate(version, transfer=apply)
    return WeightUpdate(version, applied=True)


def _portions(prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
    """Lists that stay well below what a gateway takes in one call."""
    portion: list[Prompt] = []
    tokens = 0
    for prompt in prompts:
        portion.append(prompt)
        tokens += len(prompt.prompt_ids)
        if tokens >= PORTION_TOKENS:
            yield portion
            portion, tokens = [], 0
    if portion:
        yield portion
