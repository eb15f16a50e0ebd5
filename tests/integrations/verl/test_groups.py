"""The sessions of a prompt, as one group."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.verl.generate_call import RolloutLengths
from rollout_sched.integrations.verl.groups import (
    MASK,
    GroupFailed,
    SessionGroup,
    token_output,
    trained,
)
from rollout_sched.live.trainer.samples import Prompt, Sample, Span
from tests.integrations.samples import make_sample

LENGTHS = RolloutLengths(prompt_length=10, response_length=100)


def sample(index: int, *spans: Span) -> Sample:
    tokens = range(spans[-1].end if spans else 0)
    return make_sample("a", index, tokens, spans=spans, num_interruptions=2)


class Maker:
    """Makes groups of two; notes what it was asked for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[Prompt] = []
        self._error = error

    async def __call__(self, prompt: Prompt) -> list[Sample]:
        self.asked.append(prompt)
        await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        return [sample(0), sample(1)]


async def test_a_group_is_asked_for_once_and_each_session_has_a_sample_of_its_own():
    maker = Maker()
    group = SessionGroup("a", 2, LENGTHS, maker)
    both = await asyncio.gather(
        group.sample(1, [1, 2], {"logprobs": True}), group.sample(0, [1, 2], {"logprobs": True})
    )
    assert [one.index for one in both] == [1, 0]
    (prompt,) = maker.asked
    assert (prompt.uid, prompt.samples, prompt.max_tokens) == ("a", 2, 100)
    assert prompt.sampling == {"logprobs": 0}


async def test_a_prompt_has_the_same_name_in_every_epoch():
    names = []
    for uid, ids in (("a", [1, 2]), ("b", [1, 2]), ("c", [1, 3])):
        maker = Maker()
        await SessionGroup(uid, 2, LENGTHS, maker).sample(0, ids, {})
        names.append(maker.asked[0].prompt_key)
    assert names[0] == names[1] != names[2]


async def test_a_failed_group_fails_every_session():
    group = SessionGroup("a", 2, LENGTHS, Maker(GroupFailed("no")))
    results = await asyncio.gather(
        group.sample(0, [1], {}), group.sample(1, [1], {}), return_exceptions=True
    )
    assert [type(result) for result in results] == [GroupFailed, GroupFailed]


async def test_a_session_that_is_cancelled_takes_nothing_from_the_others():
    group = SessionGroup("a", 2, LENGTHS, Maker())
    first = asyncio.create_task(group.sample(0, [1], {}))
    await asyncio.sleep(0)
    first.cancel()
    assert (await group.sample(1, [1], {})).index == 1


async def test_a_second_turn_and_a_prompt_of_its_own_are_refused_with_the_remedy():
    group = SessionGroup("a", 2, LENGTHS, Maker())
    await group.sample(0, [1], {})
    with pytest.raises(CallerError, match="GatewayAgentLoopManager"):
        await group.sample(0, [1, 5], {})
    with pytest.raises(CallerError, match="another prompt"):
        await group.sample(1, [2], {})


def test_masked_tokens_pass_verls_loops():
    made = sample(0, Span(3, "http://a", 0, 2), Span(5, "http://b", 2, 3))
    masked = msgspec.structs.replace(made, response_mask=[0, 0, 1])
    assert token_output(masked)["extra_fields"][MASK] == [0, 0, 1]


@pytest.mark.parametrize(
    ("loops", "samples", "both"),
    [
        ([1, 1, 1], [0, 1, 1], [0, 1, 1]),
        ([1, 1], [0, 1, 1], [0, 1]),  # cut at the longest response
        ([1, 1, 1, 0], [0, 1, 1], [0, 1, 1, 0]),  # the end of a turn, by a chat template
    ],
)
def test_tokens_that_either_mask_leaves_out_are_not_trained(loops, samples, both):
    assert trained(loops, samples) == both


def test_a_sample_is_an_output_with_the_versions_that_made_it():
    made = token_output(sample(0, Span(3, "http://a", 0, 2), Span(5, "http://b", 2, 3)))
    assert made["token_ids"] == [0, 1, 2]
    assert made["log_probs"] == [-0.5] * 3
    assert made["num_preempted"] == 2
    assert made["extra_fields"] == {
        "global_steps": 5,
        "min_global_steps": 3,
        "max_global_steps": 5,
        "versions": [3, 3, 5],
    }
