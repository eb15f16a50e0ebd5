"""A batch as it is sent: who shares a prompt, what a router can see, which groups are taken."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.live.rollout_batch import asks, groups_of
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn


def trace(*sizes):
    groups = {
        f"g{number}": [
            SampleRecord(f"g{number}", index, 20 + number, (Turn(100 * number + index + 1),))
            for index in range(size)
        ]
        for number, size in enumerate(sizes)
    }
    return Trace("small", groups)


def bodies(batch):
    return [msgspec.json.decode(ask.body) for ask in batch]


def test_batches_follow_each_other_and_begin_anew_at_the_end():
    taken = [groups_of(trace(2, 2, 2), batch, 2, 2) for batch in range(3)]
    assert [[members[0].group for members in batch] for batch in taken] == [
        ["g0", "g1"],
        ["g2", "g0"],
        ["g1", "g2"],
    ]


def test_groups_are_cut_to_the_samples_and_small_ones_left_out():
    taken = groups_of(trace(3, 1, 2), 0, 2, 2)
    assert [len(members) for members in taken] == [2, 2]
    assert [members[0].group for members in taken] == ["g0", "g2"]


def test_a_trace_without_such_groups_is_refused():
    with pytest.raises(ValueError, match="small has no group of 4 samples"):
        groups_of(trace(3, 3), 0, 1, 4)


def test_siblings_share_a_prompt_that_nobody_else_has():
    groups = groups_of(trace(2, 2), 0, 2, 2)
    first, other = (bodies(asks(groups, "m", 4_096, nonce)) for nonce in ("a", "b"))
    prompts = [tuple(body["prompt"]) for body in first]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert not {*prompts} & {tuple(body["prompt"]) for body in other}
    assert [len(prompt) for prompt in prompts] == [20, 20, 21, 21]


def test_only_the_instance_is_told_the_length():
    batch = asks(groups_of(trace(2, 2), 0, 2, 2), "m", 4_096, "a")
    told = bodies(batch)
    assert [ask.tokens for ask in batch] == [1, 2, 101, 102]
    assert [body.pop("vllm_xargs") for body in told] == [
        {"fake_response_tokens": ask.tokens} for ask in batch
    ]
    assert {body["max_tokens"] for body in told} == {4_096}
    assert told[0] == told[1]
    assert len({ask.session for ask in batch}) == 4
    assert batch[0].headers["X-Group-ID"] == batch[1].headers["X-Group-ID"] == "a/g0"


def test_a_prompt_as_text_has_as_many_words():
    (body, *_) = bodies(asks(groups_of(trace(1), 0, 1, 1), "m", 64, "a", as_text=True))
    assert len(body["prompt"].split()) == 20
