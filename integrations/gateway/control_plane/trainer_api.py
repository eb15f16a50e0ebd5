"""The routes of /rollout/v1: `live.trainer.session` for a trainer in another process."""

from __future__ import annotations

import asyncio

from aiohttp import web

from rollout_sched.client.remote import EPOCH, NextBatch, Renewal, SubmissionAnswer
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.codec import read, refusal, reply
from rollout_sched.integrations.gateway.control_plane.gateway import Gateway
from rollout_sched.live.trainer import LeaseEnded, NotReady
from rollout_sched.live.trainer.samples import Mismatch, Prompt, Uid
from rollout_sched.store import StoreFull

#: The root of the trainer's paths.
ROLLOUT = "/rollout/v1"

#: Groups that are submitted before other tasks run.
AT_ONCE = 64


class TrainerApi:
    """Handlers for the trainer; at most `max_samples` samples may be open at once."""

    def __init__(self, gateway: Gateway, max_samples: int) -> None:
        self._gateway = gateway
        self._max_samples = max_samples
        self._arriving = 0  # samples that were counted but are not submitted yet

    async def submit(self, request: web.Request) -> web.Response:
        """Queue a list of prompts. If one is refused, those before it stay queued, as the error
        says.

        If they are too many, none is queued: 413 if they exceed the limit, 503 if they do not fit
        in addition to the samples that are open. A repeated submission, for example after a lost
        answer, is answered like the first; `delivered` has the uids of those whose batch was
        acknowledged. 507: the store has no room for them.
        """
        prompts = await read(request, list[Prompt])
        is_new = self._gateway.trainer.submissions.is_new
        new = {prompt.uid: prompt.samples for prompt in prompts if is_new(prompt.uid)}
        delivered: list[str] = []
        asked, most = sum(new.values()), self._max_samples
        here = self._gateway.trainer.submissions.open_samples + self._arriving
        if asked > most:
            return refusal(413, f"{asked} samples submitted, the limit is {most} (--max-samples)")
        if here + asked > most:
            return refusal(
                503,
                f"too many samples: {asked} submitted, {here} are here, the limit is {most} "
                "(--max-samples); submit them again when batches have been delivered",
            )
        self._arriving += asked
        try:
            for accepted, prompt in enumerate(prompts):
                if accepted % AT_ONCE == 0:
                    await asyncio.sleep(0)
                try:
                    delivered += self._gateway.trainer.submit([prompt])
                except CallerError as error:
                    status = 507 if isinstance(error, StoreFull) else 409
                    return refusal(status, f"{error} ({accepted} groups before it were accepted)")
                samples = new.pop(prompt.uid, 0)
                asked -= samples
                self._arriving -= samples
        finally:
            self._arriving -= asked
            await self._gateway.trainer.durable()
        return reply(request, SubmissionAnswer(len(prompts), delivered))

    async def close(self, request: web.Request) -> web.Response:
        """No more groups will come: what remains may be delivered in smaller batches."""
        self._gateway.trainer.close_submissions()
        await self._gateway.trainer.durable()
        return web.Response(status=204)

    async def unknown(self, request: web.Request) -> web.Response:
        """Of a list of uids, those that will deliver nothing unless they are submitted (again)."""
        uids = await read(request, list[Uid])
        unknown = self._gateway.trainer.submissions.unknown(uids)
        return reply(request, {"unknown": unknown})

    async def next_batch(self, request: web.Request) -> web.Response:
        """A batch, or a part of it; 204 when nothing is left, 202 when none was ready in time, 410
        when the acknowledged batch is leased to another trainer.

        A call with an earlier epoch gets 202 at once, and its `ack` is ignored.
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
        except NotReady:
            return reply(request, {"pending": True}, 202)
        except LeaseEnded as error:
            return refusal(410, str(error))
        return web.Response(status=204) if batch is None else reply(request, batch)

    async def renew(self, request: web.Request) -> web.Response:
        """Heartbeat: a trainer is alive and keeps its lease. Answers its batch number, or null."""
        asked = await read(request, Renewal)
        return reply(request, {"batch": self._gateway.trainer.batches.renew(asked.trainer)})

    async def mismatch(self, request: web.Request) -> web.Response:
        """A trainer has compared its log-probs with the rollouts'."""
        self._gateway.trainer.report_mismatch(await read(request, Mismatch))
        return web.Response(status=204)
