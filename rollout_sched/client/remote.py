"""The client of a gateway, which schedules in its own process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self
from urllib.parse import quote

import msgspec

from rollout_sched.client.heartbeat import Heartbeat
from rollout_sched.client.new_weights import Apply, is_coroutine, update_of
from rollout_sched.client.rollout_scheduler import NOTHING, RolloutScheduler
from rollout_sched.client.submitted_prompts import ForgottenPrompts, SubmittedPrompts
from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.gateway.control_plane import STATE, TrainerCalls
from rollout_sched.integrations.gateway.control_plane.weights import WeightUpdate
from rollout_sched.live.ports import InstanceClient
from rollout_sched.live.requests import Tool
from rollout_sched.live.trainer import TRAINER
from rollout_sched.live.trainer.samples import Batch, Prompt

log = logging.getLogger(__name__)

#: Seconds that one request for a batch may take, and between two checks of the fleet's version.
LONG_POLL_S = 30.0
LOOK_S = 0.5

#: Prompt uids sent in one call.
PORTION_UIDS = 4096

#: Prompt tokens sent in one call.
PORTION_TOKENS = 2**20


class Remote(RolloutScheduler):
    """A gateway schedules. A batch counts as received when the next one is requested.

    A restarted gateway has another epoch. A wait for a batch then raises ForgottenPrompts if the
    gateway has lost prompts. `calls` creates a transport to the gateway: one for this object, and
    one for the heartbeat in its own thread.
    """

    def __init__(self, calls: Callable[[], TrainerCalls], trainer: str) -> None:
        self._gateway = calls()
        self._heartbeat = Heartbeat(calls(), trainer)
        self._trainer = trainer
        self._received = NOTHING
        self._submitted = SubmittedPrompts()
        self._epoch = ""
        self._run: str | None = None  # run id of the gateway's durable store, if it has one

    async def __aenter__(self) -> Self:
        await self._gateway.open()
        try:
            state = await self._gateway.greet()
        except BaseException:
            await self._gateway.close()
            raise
        self._epoch, self._run = self._gateway.epoch, _run_of(state)
        self._heartbeat.every(state["lease_s"])
        return self

    async def __aexit__(self, *error: object) -> None:
        self._heartbeat.close()
        await self._gateway.close()

    async def _submit(self, prompts: Iterable[Prompt], tool: Tool | None) -> None:
        if tool is not None:
            raise CallerError(
                "a tool is a coroutine and cannot be sent to a gateway; use from_toml, which "
                "schedules in this process"
            )
        for portion in _portions(prompts):
            try:
                # Submitting a group again has no effect, so the call may be retried.
                await self._gateway.post("/rollout/v1/groups", portion, repeatable=True)
            except TypeError as error:
                uids = f"{portion[0].uid!r} to {portion[-1].uid!r}"
                raise CallerError(f"groups {uids}: {error}: cannot be sent to a gateway") from error
            self._submitted.add(prompt.uid for prompt in portion)

    async def close_submissions(self) -> None:
        await self._gateway.post("/rollout/v1/groups/close", repeatable=True)

    async def _next_batch(self, parts: bool) -> Batch | None:
        while True:
            number, part = self._received
            asked = {
                "trainer": self._trainer,
                "ack": number,
                "part": part,
                "parts": parts,
                "timeout_s": LONG_POLL_S,
            }
            status, body = await self._gateway.post(
                "/rollout/v1/batches/next", asked, repeatable=True
            )
            if self._gateway.epoch != self._epoch:
                await self._go_on_with_another()
                continue
            if status == 204:
                return None
            if status == 200:
                batch = msgspec.msgpack.decode(body, type=Batch)
                self._received = batch.number, batch.part
                self._submitted.received(batch)
                return batch

    async def _go_on_with_another(self) -> None:
        """Continue with a restarted gateway. Raises ForgottenPrompts if it has lost prompts.

        With several trainers and the same durable store nothing is lost: a prompt that the store
        no longer knows was delivered to another trainer.
        """
        earlier, run, state = self._epoch, self._run, await self.state()
        self._epoch, self._run = self._gateway.epoch, _run_of(state)
        self._heartbeat.every(state["lease_s"])
        log.warning("the gateway was restarted: epoch %s after %s", self._epoch, earlier)
        if self._trainer != TRAINER and run is not None and run == self._run:
            return
        number, _ = self._received
        if number is not None and state["batches"] <= number:
            self._received = NOTHING  # the gateway has started over, and so have its batch numbers
        uids, forgotten = self._submitted.uids, list[str]()
        for at in range(0, len(uids), PORTION_UIDS):
            asked = uids[at : at + PORTION_UIDS]
            _, body = await self._gateway.post("/rollout/v1/groups/unknown", asked, repeatable=True)
            forgotten += msgspec.msgpack.decode(body, type=dict[str, list[str]])["unknown"]
        if forgotten:
            self._submitted.remove(forgotten)
            raise ForgottenPrompts(forgotten)

    async def _publish_weights(self, version: int, apply: Apply, wait: bool) -> None:
        if is_coroutine(apply):
            raise CallerError(
                "a coroutine cannot be sent to a gateway; pass Reload(path) or Transfer(...), or "
                "load the weights yourself and pass Applied()"
            )
        await self._tell_of(update_of(version, apply))
        while wait and not (await self.state())["loaded"]:
            await asyncio.sleep(LOOK_S)

    async def _tell_of(self, update: WeightUpdate) -> None:
        await self._gateway.post("/rollout/v1/weights", update)

    async def give_back(self, url: str) -> None:
        raise CallerError(
            "a gateway does not lend instances; use from_toml, which schedules in the trainer's "
            "process"
        )

    async def add_instance(self, instance: str | InstanceClient) -> None:
        if not isinstance(instance, str):
            raise CallerError("a gateway needs the URL of an instance, not a client")
        await self._gateway.post("/admin/instances", {"url": instance})

    async def remove_instance(self, url: str, *, drain: bool = False) -> None:
        path = f"/admin/instances/{quote(url, safe='')}"
        await self._gateway.send(*(("POST", f"{path}/drain") if drain else ("DELETE", path)))

    async def state(self) -> dict[str, Any]:
        _, body = await self._gateway.send("GET", STATE, repeatable=True)
        state: dict[str, Any] = msgspec.msgpack.decode(body)
        return state


def _run_of(state: dict[str, Any]) -> str | None:
    """The id of the run in the gateway's store. None without a store, or if a power failure can
    lose what the gateway has already answered."""
    store = state["store"]
    return None if store is None or store["durable"] == "off" else str(store["run"])


def _portions(prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
    """Lists well below the size limit of one gateway call. If a prompt is refused, those before it
    are still yielded."""
    portion: list[Prompt] = []
    tokens = 0
    try:
        for prompt in prompts:
            portion.append(prompt)
            tokens += len(prompt.prompt_ids)
            if tokens >= PORTION_TOKENS:
                yield portion
                portion, tokens = [], 0
    except CallerError:
        if portion:
            yield portion
        raise
    if portion:
        yield portion
