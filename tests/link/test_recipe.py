"""A front decodes a recipe unchanged, and makes the same samples from it as the host would."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.link.protocol import Recipes, Welcome, encoded, read_welcome
from rollout_sched.live.requests.token_payload import DraftTest, TokenPayload
from rollout_sched.live.settings import Settings
from rollout_sched.live.trainer.samples import Prompt

WELCOME = Welcome("run", Settings(stream_s=0.5), True, 8, 0.25, 7)


def test_a_welcome_is_read_as_it_was_written() -> None:
    assert read_welcome(encoded(WELCOME)) == WELCOME


@pytest.mark.parametrize("frame", [b"", b"\xc1", encoded(Prompt("a", [1], 1, 9))])
def test_what_is_no_welcome(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_welcome(frame)


@pytest.mark.parametrize("leniency", [None, 0.25])
def test_samples_are_made_of_their_prompt(leniency: float | None) -> None:
    recipes = Recipes(msgspec.structs.replace(WELCOME, leniency=leniency))
    prompt = Prompt("a", [4, 5], 2, 9, sampling={"temperature": 0.5, "seed": 3})
    payload = recipes.factory(encoded(prompt))(1)
    assert isinstance(payload, TokenPayload)
    assert payload.prompt_ids == [4, 5]
    assert payload.stream_every == 8
    assert payload.sampling.items() >= prompt.sampling_of(1).items()
    assert payload.test == (None if leniency is None else DraftTest(leniency, 7))


def test_what_is_no_prompt() -> None:
    with pytest.raises(msgspec.DecodeError):
        Recipes(WELCOME).factory(b"\xc1")
