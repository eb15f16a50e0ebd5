"""Recipes: what the scheduler's process sends so that a front can make the samples of a group."""

from __future__ import annotations

from functools import partial

import msgspec

from rollout_sched.live.draft_test import DraftTest
from rollout_sched.live.payload_book import PayloadFactory
from rollout_sched.live.sample_payloads import SamplePayloads
from rollout_sched.live.samples import Prompt
from rollout_sched.live.settings import Settings

_ENCODER = msgspec.msgpack.Encoder()


class Welcome(msgspec.Struct, frozen=True):
    """The answer to a front that connects.

    epoch         of the scheduler
    settings      of its driver, also used by the front
    keeps_partial whether the tokens of an interrupted response are kept
    stream_every  tokens between partial results of an instance
    leniency      of the test of drafts; None: none are tested
    seed          of the random test of drafts
    """

    epoch: str
    settings: Settings
    keeps_partial: bool
    stream_every: int
    leniency: float | None
    seed: int


def encoded(told: Welcome | Prompt) -> bytes:
    return _ENCODER.encode(told)


def read_welcome(frame: bytes) -> Welcome:
    """Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(frame, type=Welcome)


class Recipes:
    """Makes the payloads of groups from their recipes, for one epoch."""

    def __init__(self, welcome: Welcome) -> None:
        leniency = welcome.leniency
        test = None if leniency is None else DraftTest(leniency, welcome.seed)
        self._payloads = SamplePayloads(welcome.stream_every, test, lambda: 0)

    def factory(self, recipe: bytes) -> PayloadFactory:
        """The factory of a group's payloads. Raises msgspec.DecodeError."""
        prompt = msgspec.msgpack.decode(recipe, type=Prompt)
        return partial(self._payloads.new, prompt)
