"""/rollout/v1: what `live.trainer_session` offers, for a trainer in another process."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from aiohttp import web

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.codec import read, refusal, reply
from rollout_sched.integrations.gateway.control_plane.gateway import Gateway
from rollout_sched.live.batch_delivery import NotYet
from rollout_sched.live.leases import TRAINER, LeaseEnded, TrainerName
from rollout_sched.live.samples import Prompt, Uid
from rollout_sched.store.errors import StoreFull

#: The trainer's part of the gateway.
ROLLOUT = "/rollout/v1"

#: A header of every answer there, and of what a trainer asks that has heard of it: names the run
#: of a scheduler. A gateway that was restarted says another.
EPOCH = "Rollout-Epoch"

#: Groups that are submitted before others have their turn.
AT_ONCE = 64


class Renewal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """trainer  whose lease it is"""

    trainer: TrainerName = TRAINER


class NextBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """trainer    who asks
    ack        the number of the batch that has arrived
    part       of it only the parts up to this one have
    parts      what is whole of the next batch will do
    timeout_s  how long to wait at most
    """

    trainer: TrainerName = TRAINER
    ack: int | None = None
    part: int | None = None
    parts: bool = False
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 30.0


class TrainerApi:
    """Routes for the trainer; at most `max_samples` may be here at once."""

    def __init__(self, gateway: Gateway, max_samples: int) -> None:
        self._gateway = gateway
        self._max_samples = max_samples
        self._arriving = 0  # samples that have room and are not submitted yet

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/rollout/v1/groups", self.submit),
            web.post("/rollout/v1/groups/close", self.close),
            web.post("/rollout/v1/groups/unknown", self.unknown),
            web.post("/rollout/v1/batches/next", self.next_batch),
            web.post("/rollout/v1/batches/renew", self.renew),
        ]

    async def submit(self, request: web.Request) -> web.Response:
        """Queue a list of prompts; of one that cannot be, those before it stay, as the error says.

        All or none of them if they are too many: 413 for more than may ever be here, 503 for more
        than fit beside those that are.
        A submission that is sent again, because its answer was lost, is answered like the first.
        507: the store has no room for them.
        """
        prompts = await read(request, list[Prompt])
        known = self._gateway.trainer.submissions.known
        new = {prompt.uid: prompt.samples for prompt in prompts if known(prompt.uid) is None}
        asked, most = sum(new.values()), self._max_samples
        here = self._gateway.trainer.submissions.open_samples + self._arriving
        if asked > most:
            return refusal(413, f"these are {asked} samples, of at most {most} (--max-samples)")
        if here + asked > most:
            return refusal(
                503,
                f"these are {asked} samples, and {here} are here, of at most {most} "
                "(--max-samples); submit them again when batches have been delivered",
            )
        self._arriving += asked
        try:
            for accepted, prompt in enumerate(prompts):
                if accepted % AT_ONCE == 0:
                    await asyncio.sleep(0)
                try:
                    self._gateway.trainer.submit([prompt])
                except CallerError as error:
                    status = 507 if isinstance(error, StoreFull) else 409
                    return refusal(status, f"{error} ({accepted} groups before it were accepted)")
                samples = new.pop(prompt.uid, 0)
                asked -= samples
                self._arriving -= samples
        finally:
            self._arriving -= asked
            await self._gateway.trainer.durable()
        return reply(request, {"accepted": len(prompts)})

    async def close(self, request: web.Request) -> web.Response:
        self._gateway.trainer.close_submissions()
        await self._gateway.trainer.durable()
        return web.Response(status=204)

    async def unknown(self, request: web.Request) -> web.Response:
        """Of a list of uids those of which nothing will come, unless they are submitted (again)."""
        uids = await read(request, list[Uid])
        unknown = self._gateway.trainer.unknown(uids)
        return reply(request, {"unknown": unknown})

    async def next_batch(self, request: web.Request) -> web.Response:
        """A batch, or a part of it; 204 when nothing is left, 202 when none came in time, 410 where
        what is acknowledged is another trainer's.

        Who speaks of an earlier epoch is told so at once (202), before anything counts as received.
        """
        asked = await read(request, NextBatch)
        if request.headers.get(EPOCH, self._gateway.driver.epoch) != self._gateway.driver.epoch:
            return reply(request, {"pending": True}, 202)
        try:
            batch = await self._gateway.trainer.next_batch(
                asked.ack,
                asked.timeout_s,
                trainer=asked.trainer,
                part=asked.part,
                parts=asked.parts,
            )
        except NotYet:
            return reply(request, {"pending": True}, 202)
        except LeaseEnded as error:
            return refusal(410, str(error))
        return web.Response(status=204) if batch is None else reply(request, batch)

    async def renew(self, request: web.Request) -> web.Response:
        """A trainer is alive, and keeps what it has: the number of its batch, or null."""
        asked = await read(request, Renewal)
        return reply(request, {"batch": self._gateway.trainer.batches.renew(asked.trainer)})
