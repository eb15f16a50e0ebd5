"""Payloads that continue with the tokens that the store has of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rollout_sched.core.actions import Deliver
from rollout_sched.live.payload_book import PayloadFactory
from rollout_sched.live.payloads import TokenPayload
from rollout_sched.live.recovery import Recovered
from rollout_sched.live.samples import Batch, Prompt, batch_of, sample_of
from rollout_sched.live.stored_transcripts import StoredTranscripts


class RestoredPayloads:
    """The payloads of an earlier run. `make(prompt, index)` creates one without tokens.

    Tokens are read from the store when they are needed: to be sent or delivered.
    """

    def __init__(
        self,
        found: Recovered,
        transcripts: StoredTranscripts,
        make: Callable[[Prompt, int], TokenPayload],
    ) -> None:
        self._found = found
        self._transcripts = transcripts
        self._make = make

    def factory(self, prompt: Prompt) -> PayloadFactory:
        """Makes the payloads of a prompt's samples."""
        return partial(self._payload, prompt)

    def batches(self) -> list[Batch]:
        """The delivered and unacknowledged batches, part by part. The newest part of each reports
        the groups lost by then; the last part of a batch may not be made yet."""
        newest = {action.batch: action for action in self._found.deliveries}
        return [
            self._batch(action, is_newest=newest[action.batch] is action)
            for action in self._found.deliveries
        ]

    def _batch(self, action: Deliver, *, is_newest: bool) -> Batch:
        prompts = self._found.prompts
        samples = [
            sample_of(
                counted,
                self._payload(prompts[counted.group], counted.index),
                prompts[counted.group],
                self._found.rewards.get(counted.request),
            )
            for counted in action.samples
        ]
        lost = self._found.told.get(action.batch, []) if is_newest else []
        return batch_of(action, samples, lost)

    def _payload(self, prompt: Prompt, index: int) -> TokenPayload:
        payload = self._make(prompt, index)
        self._transcripts.read(f"{prompt.uid}/{index}", payload.transcript)
        return payload
