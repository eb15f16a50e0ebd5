"""Running attempts: what the driver holds of each, and attempts that are coroutines."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Coroutine
from typing import Any

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import TokensArrived
from rollout_sched.live.instances.attempts import InFlight
from rollout_sched.live.ports import (
    Attempting,
    InstanceClient,
    Outcome,
    Over,
    Payload,
    plain_message,
)

log = logging.getLogger(__name__)

#: Seconds between two aborts of one attempt: the first wait, and the longest.
_ABORT_AGAIN_S = (0.25, 4.0)


class LiveAttempt(InFlight):
    """One dispatch while this process carries it out."""

    __slots__ = ("attempting", "client", "known_tokens", "order_id", "payload")

    def __init__(
        self,
        dispatch: Dispatch,
        payload: Payload,
        client: InstanceClient,
        order_id: str,
        begun: float,
    ) -> None:
        super().__init__(dispatch, begun)
        self.payload = payload
        self.client = client
        self.order_id = order_id
        self.known_tokens = 0  # tokens of its stream that the core knows of
        self.attempting: Attempting | None = None  # None until it is sent

    @property
    def streamed(self) -> int:
        """Tokens that its stream has brought. Raises what the payload raises."""
        return self.payload.transcript.streamed(self.dispatch.attempt)

    @property
    def reads(self) -> bool:
        """False for a stream that we hold back because its client does not read."""
        return self.attempting is not None and not getattr(self.attempting, "held_back", False)

    def progress(self) -> TokensArrived | None:
        """The event for streamed tokens that the core does not know of yet; None if there are none.
        Raises what the payload raises."""
        dispatch = self.dispatch
        tokens = min(self.streamed, dispatch.max_new_tokens)
        if tokens <= self.known_tokens:
            return None
        self.known_tokens = tokens
        return TokensArrived(dispatch.request, dispatch.attempt, tokens)

    def keep_streamed(self) -> None:
        """The stream of the attempt broke: keep the tokens that the core was told of; no more will
        come."""
        if self.known_tokens:
            attempt, transcript = self.dispatch.attempt, self.payload.transcript
            transcript.append(
                attempt, self.known_tokens, transcript.partial(attempt, self.known_tokens)
            )

    async def abort(self, patience_s: float) -> bool:
        """Abort it; False if it has not ended after `patience_s` seconds.

        An abort may overtake its order, so it is repeated until the answer has come.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        wait_s, longest_s = _ABORT_AGAIN_S
        while not self.ended().done():
            try:
                async with asyncio.timeout_at(deadline):
                    await self.client.abort(self.order_id)
            except Exception as error:  # whatever the error, the attempt must end
                why = plain_message(error)
                log.warning("abort of %s on %s: %s", self.order_id, self.client.name, why)
            await asyncio.wait({self.ended()}, timeout=wait_s)
            wait_s = min(2 * wait_s, longest_s)
            if loop.time() > deadline and not self.ended().done():
                return False
        return True

    def cancel(self) -> None:
        """Free what the attempt holds; no effect after its end."""
        attempting = self.attempting
        self.release()
        if attempting is not None:
            attempting.cancel()

    def release(self) -> None:
        """Drop the reference to it: it refers to us through its `over`, which would be a cycle."""
        self.attempting = None


class AttemptTask:
    """An attempt that is a coroutine (`live.ports.Attempting`).

    `over` is called in the same iteration of the loop in which the coroutine ends: in the next one,
    a later event could come first.
    """

    def __init__(self, attempt: Coroutine[Any, Any, Outcome], over: Over) -> None:
        self._attempt = attempt
        self._task = asyncio.get_running_loop().create_task(_carry_out(attempt, over))

    def cancel(self) -> None:
        self._task.cancel()
        if inspect.getcoroutinestate(self._attempt) == inspect.CORO_CREATED:
            self._attempt.close()  # the cancelled task will never await it


async def _carry_out(attempt: Coroutine[Any, Any, Outcome], over: Over) -> None:
    try:
        outcome = await attempt
    except Exception as error:
        over(error)
    else:
        over(outcome)
