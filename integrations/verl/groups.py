"""The sessions of a prompt, each an agent loop of verl's, as one of our groups.

A session asks for its response by itself; what the scheduler is asked for is the group, once, with
the tokens that its first session brings. Each session then gets a sample of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.integrations.verl.generate_call import COMPLETED, RolloutLengths, sampling_of
from rollout_sched.live.samples import Prompt, Sample

#: Has a group made: its samples, or an error if it can never be whole.
Make = Callable[[Prompt], Awaitable[list[Sample]]]


class GroupFailed(RolloutError, RuntimeError):
    """The group can never be whole; verl tells its trainer so."""


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
        """The sample of a session, which asks once. Raises CallerError, or what the making of the
        group raises."""
        if session in self._served:
            raise CallerError(
                f"session {session} of {self.uid} asks for a second turn, and a group of the "
                "scheduler's has one: keep such agent loops with "
                "rollout_sched.integrations.verl.manager.GatewayAgentLoopManager"
            )
        self._served.add(session)
        prompt = self._prompt(prompt_ids, sampling_params)
        if self._samples is None:
            self._asked = prompt
            self._samples = asyncio.ensure_future(self._make(prompt))
        elif prompt != self._asked:
            raise CallerError(
                f"session {session} of {self.uid} brings another prompt or other sampling "
                "parameters than the session before it; the samples of a group have both in common"
            )
        # One session that is cancelled takes nothing from the others.
        return (await asyncio.shield(self._samples))[session]

    def _prompt(self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> Prompt:
        """What names it in every epoch are its tokens: a data set's rows need not have an index."""
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


#: The extra field in which a sample's mask passes verl's loops, where not all of it is trained.
MASK = "rollout_sched_mask"


def token_output(sample: Sample) -> dict[str, Any]:
    """The fields of verl's TokenOutput, which has none for a mask. `versions` has one for each
    token of the response."""
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
    """The mask of a response that verl's loop has made of a sample's: what either leaves out is not
    trained. A loop may have cut the response, or added to it."""
    both = [loop & ours for loop, ours in zip(loops, samples, strict=False)]
    return both + list(loops[len(samples) :])
