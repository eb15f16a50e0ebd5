"""The sessions of a prompt, each an agent loop of verl, as one group of the scheduler.

Each session asks for its response separately. The first one submits the whole group with its prompt
tokens; each session then gets its own sample.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.integrations.verl.generate_call import COMPLETED, RolloutLengths, sampling_of
from rollout_sched.live.trainer.samples import Prompt, Sample

#: Submits a group: returns its samples, or raises an error if it can never be complete.
Make = Callable[[Prompt], Awaitable[list[Sample]]]


class GroupFailed(RolloutError, RuntimeError):
    """The group can never be complete; verl reports this to its trainer."""


class SessionGroup:
    """The group of one prompt, while its sessions run."""

    def __init__(self, uid: str, sessions: int, lengths: RolloutLengths, make: Make) -> None:
        self.uid = uid
        self._sessions = sessions
        self._lengths = lengths
        self._make = make
        self._asked: Prompt | None = None
        self._samples: asyncio.Future[list[Sample]] | None = None
        self._served: set[int] = set()

    async def sample(
        self, session: int, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> Sample:
        """The sample of a session, which may ask once. Raises CallerError, or what `make`
        raises."""
        if session in self._served:
            raise CallerError(
                f"session {session} of {self.uid} asks for a second turn, but a group has only "
                "one: for such agent loops use "
                "rollout_sched.integrations.verl.manager.GatewayAgentLoopManager"
            )
        self._served.add(session)
        prompt = self._prompt(prompt_ids, sampling_params)
        if self._samples is None:
            self._asked = prompt
            self._samples = asyncio.ensure_future(self._make(prompt))
        elif prompt != self._asked:
            raise CallerError(
                f"session {session} of {self.uid} has another prompt or other sampling parameters "
                "than the first session; all samples of a group must have the same"
            )
        # Shielded: cancelling one session must not cancel the group of the others.
        return (await asyncio.shield(self._samples))[session]

    def _prompt(self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Prompt:
        """The prompt key is a hash of the tokens, the same in every epoch: rows of a data set need
        not have an index."""
        ids = [int(token) for token in prompt_ids]
        sampling, limit = sampling_of(sampling_params)
        name = hashlib.blake2b(msgspec.msgpack.encode(ids), digest_size=16).hexdigest()
        return Prompt(
            uid=self.uid,
            prompt_ids=ids,
            samples=self._sessions,
            max_tokens=self._lengths.room_after(len(ids), limit),
            sampling=sampling,
            prompt_key=name,
        )


#: The extra field that carries a sample's mask through verl's loops if not all of it is trained.
MASK = "rollout_sched_mask"


def token_output(sample: Sample) -> dict[str, Any]:
    """The fields of verl's TokenOutput, which has no field for a mask. `versions` has one entry for
    each response token."""
    masked = {} if all(sample.response_mask) else {MASK: sample.response_mask}
    return {
        "token_ids": sample.response_ids,
        "log_probs": sample.rollout_log_probs,
        "stop_reason": COMPLETED,
        "num_preempted": sample.num_interruptions,
        "extra_fields": {
            "global_steps": sample.newest_version,
            "min_global_steps": sample.oldest_version,
            "max_global_steps": sample.newest_version,
            "versions": sample.versions,
            **masked,
        },
    }


def trained(loops: Sequence[int], samples: Sequence[int]) -> list[int]:
    """The mask of a response after verl's loop: a token that either mask leaves out is not trained.
    The loop may have cut the response or appended to it."""
    both = [loop & ours for loop, ours in zip(loops, samples, strict=False)]
    return both + list(loops[len(samples) :])
