"""The client of a gateway, which schedules in its own process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self
from urllib.parse import quote

import msgspec

from rollout_sched.client.blocking import LoopThread
from rollout_sched.client.remote.calls import (
    STATE,
    NextBatch,
    Renewal,
    SubmissionAnswer,
    TrainerCalls,
)
from rollout_sched.client.rollout_scheduler import NOTHING, RolloutScheduler
from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.integrations.vllm.weight_updates import (
    Apply,
    is_coroutine,
    update_of,
)
from rollout_sched.live.ports import InstanceClient
from rollout_sched.live.requests import Tool
from rollout_sched.live.trainer import TRAINER
from rollout_sched.live.trainer.samples import Batch, Mismatch, Prompt

log = logging.getLogger(__name__)

#: Seconds that one request for a batch may take, and between two checks of the fleet's version.
LONG_POLL_S = 30.0
POLL_S = 0.5

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

    async def _submit(self, prompts: Iterable[Prompt], tool: Tool | None) -> list[str]:
        if tool is not None:
            raise CallerError(
                "a tool is a coroutine and cannot be sent to a gateway; use from_toml, which "
                "schedules in this process"
            )
        delivered = list[str]()
        for portion in _portions(prompts):
            try:
                # Submitting a group again has no effect, so the call may be retried.
                _, body = await self._gateway.post("/rollout/v1/groups", portion, repeatable=True)
            except TypeError as error:
                uids = f"{portion[0].uid!r} to {portion[-1].uid!r}"
                raise CallerError(f"groups {uids}: {error}: cannot be sent to a gateway") from error
            self._submitted.add(prompt.uid for prompt in portion)
            delivered += msgspec.msgpack.decode(body, type=SubmissionAnswer).delivered
        self._submitted.remove(delivered)
        return delivered

    async def close_submissions(self) -> None:
        await self._gateway.post("/rollout/v1/groups/close", repeatable=True)

    async def _next_batch(self, parts: bool) -> Batch | None:
        while True:
            number, part = self._received
            asked = NextBatch(self._trainer, number, part, parts, LONG_POLL_S)
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

        With several trainers and the same durable store nothing is lost: if the store does not
        know a prompt, another trainer was told that it has failed.
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
        # Publishing a version again has no effect, so the call may be retried.
        update = update_of(version, apply)
        await self._gateway.post("/rollout/v1/weights", update, repeatable=True)
        while wait and not (await self.state())["loaded"]:
            await asyncio.sleep(POLL_S)

    async def report_mismatch(self, mismatch: Mismatch) -> None:
        await self._gateway.post("/rollout/v1/mismatch", mismatch, repeatable=True)

    async def return_instance(self, url: str) -> None:
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


# ------------------------------------------------------------------------------------------
# Submitted prompts that were not received yet: a restarted gateway may have lost them.

#: Number of uids shown in the error text; `uids` has all of them.
SHOWN = 5


class ForgottenPrompts(CallerError):
    """The gateway was restarted and no longer knows these prompts: submit them again.

    uids  the uids of all of them, in the order of submission
    """

    def __init__(self, uids: Sequence[str]) -> None:
        self.uids = list(uids)
        shown = ", ".join(map(repr, self.uids[:SHOWN]))
        more = f" and {len(self.uids) - SHOWN} more" if len(self.uids) > SHOWN else ""
        super().__init__(
            f"the gateway was restarted and has lost {len(self.uids)} of the submitted prompts: "
            f"{shown}{more}; submit those in `uids` of this error again. To keep prompts across "
            f"restarts, start the gateway with --store"
        )


class SubmittedPrompts:
    """The submitted groups that were neither received in a batch nor lost, by uid."""

    def __init__(self) -> None:
        self._open: dict[str, None] = {}

    def add(self, uids: Iterable[str]) -> None:
        self._open.update(dict.fromkeys(uids))

    def received(self, batch: Batch) -> None:
        """A group is received whole or not at all."""
        self.remove([sample.uid for sample in batch.samples])
        self.remove([group.uid for group in batch.failed])
        self.remove(batch.filtered)

    def remove(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self._open.pop(uid, None)

    @property
    def uids(self) -> list[str]:
        """In the order of submission."""
        return list(self._open)


# ------------------------------------------------------------------------------------------
# Renews a trainer's lease while the trainer is busy training.

#: Renewals per lease time: two renewals in a row may be lost or stay unanswered.
BEATS = 4


class Heartbeat:
    """Renews over its own connection and in its own thread, because most trainers train in the
    event loop in which they wait for batches. It ends with the process."""

    def __init__(self, gateway: TrainerCalls, trainer: str) -> None:
        self._gateway = gateway
        self._trainer = trainer
        self._lease_s = 0.0
        self._thread: LoopThread | None = None
        self._beating: Future[None] | None = None

    def every(self, lease_s: float) -> None:
        """Renew leases that last `lease_s` seconds; 0: leases do not expire, nothing is renewed."""
        if lease_s == self._lease_s:
            return
        self.close()
        self._lease_s = lease_s
        if lease_s:
            self._thread = LoopThread()
            self._thread.open("lease")
            self._beating = self._thread.start(self._beat(lease_s / BEATS))

    def close(self) -> None:
        if self._thread is not None and self._beating is not None:
            self._beating.cancel()
            self._thread.stop()
            self._thread = self._beating = None

    async def _beat(self, every_s: float) -> None:
        await self._gateway.open()
        try:
            await asyncio.sleep(every_s)
            while True:  # at a fixed rate, whether or not the last renewal was answered
                await asyncio.gather(self._renew(every_s), asyncio.sleep(every_s))
        finally:
            await self._gateway.close()

    async def _renew(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._gateway.post("/rollout/v1/batches/renew", Renewal(self._trainer))
        except (RolloutError, TimeoutError) as error:
            told = str(error) or f"no answer within {within_s:g} s"
            log.warning("the lease of trainer %s was not renewed: %s", self._trainer, told)
