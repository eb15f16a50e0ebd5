"""Samples: the core's counts and the payload's tokens, joined under the ecosystem's names."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model import model
from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.events import GroupSubmitted
from rollout_sched.live.requests.token_payload import Piece, TokenPayload
from rollout_sched.live.trainer.samples import (
    Batch,
    FailedGroup,
    LostGroup,
    NamedTools,
    Prompt,
    Reward,
    Sample,
    Span,
    ToolGone,
    balanced,
    batch_of,
    sample_of,
)
from tests import virtual_net

PROMPT = Prompt("a", [1, 2, 3], 2, 10, {"logprobs": 0}, extra={"answer": 4})


def counted(*segments: model.Segment, finish: str = "stop") -> model.DeliveredSample:
    tokens = sum(segment.tokens for segment in segments)
    return model.DeliveredSample("a/0", "a", 0, 3, tokens, segments, 1, finish)


def test_every_token_has_its_version() -> None:
    payload = TokenPayload(PROMPT.prompt_ids, PROMPT.sampling)
    payload.transcript.append(1, 2, Piece([5, 6], [-1.0, -2.0]))
    payload.transcript.append(7, 1, Piece([8], [-3.0]))
    sample = sample_of(
        counted(model.Segment(3, 2, "i0"), model.Segment(4, 1, "i1")), payload, PROMPT
    )
    assert sample.response_ids == [5, 6, 8]
    assert sample.versions == [3, 3, 4]
    assert sample.rollout_log_probs == [-1.0, -2.0, -3.0]
    assert sample.segments == [Span(3, "i0", 0, 2), Span(4, "i1", 2, 3)]
    assert (sample.oldest_version, sample.newest_version) == (3, 4)
    assert (sample.num_interruptions, sample.staleness) == (1, 1)
    assert sample.extra == {"answer": 4}
    assert msgspec.json.decode(msgspec.json.encode(sample), type=type(sample)) == sample


@pytest.mark.parametrize(("finish", "status"), [("stop", "COMPLETED"), ("length", "TRUNCATED")])
def test_status(finish: str, status: str) -> None:
    payload = TokenPayload([1], {})
    payload.transcript.append(1, 1, Piece([5], None))
    sample = sample_of(counted(model.Segment(0, 1, "i0"), finish=finish), payload, PROMPT)
    assert (sample.finish_reason, sample.status) == (finish, status)
    assert sample.rollout_log_probs is None


def test_an_empty_response_has_no_version() -> None:
    sample = sample_of(counted(), TokenPayload([1], {}), PROMPT)
    assert (sample.versions, sample.oldest_version, sample.newest_version) == ([], None, None)


def test_tool_tokens_have_no_version() -> None:
    payload = TokenPayload([1], {"logprobs": 0})
    payload.transcript.append(1, 2, Piece([5, 6], [-1.0, -2.0]))
    payload.transcript.observe(1, [90, 91, 92])
    payload.transcript.append(2, 1, Piece([7], [-3.0]))
    payload.transcript.append(3, 2, Piece([8, 9], [-4.0, -5.0]))
    segments = model.Segment(3, 3, "i0"), model.Segment(4, 2, "i0")
    sample = sample_of(counted(*segments), payload, PROMPT)
    assert sample.response_ids == [5, 6, 90, 91, 92, 7, 8, 9]
    assert sample.response_mask == [1, 1, 0, 0, 0, 1, 1, 1]
    assert sample.versions == [3, 3, -1, -1, -1, 3, 4, 4]
    assert sample.rollout_log_probs == [-1.0, -2.0, 0.0, 0.0, 0.0, -3.0, -4.0, -5.0]
    assert sample.segments == [Span(3, "i0", 0, 2), Span(3, "i0", 5, 6), Span(4, "i0", 6, 8)]
    assert (sample.oldest_version, sample.newest_version) == (3, 4)
    assert sample.num_interruptions == 1  # the second turn took two attempts


def test_stale_tokens_are_masked() -> None:
    payload = TokenPayload([1], {})
    payload.transcript.append(1, 2, Piece([5, 6], None))
    payload.transcript.observe(1, [90])
    payload.transcript.append(2, 2, Piece([7, 8], None))
    segments = model.Segment(3, 3, "i0", masked=True), model.Segment(4, 1, "i0")
    sample = sample_of(counted(*segments), payload, PROMPT)
    assert sample.response_mask == [0, 0, 0, 0, 1]
    assert sample.versions == [3, 3, -1, 3, 4]
    assert [span.masked for span in sample.segments] == [True, True, False]
    assert (sample.oldest_version, sample.newest_version) == (4, 4)


def test_response_with_another_token_count_is_refused() -> None:
    payload = TokenPayload([1], {})
    payload.transcript.append(1, 2, Piece([5, 6], None))
    with pytest.raises(AssertionError, match="counted 3 tokens"):
        sample_of(counted(model.Segment(3, 3, "i0")), payload, PROMPT)


def test_groups_of_a_batch() -> None:
    payload = TokenPayload([1], {})
    samples = [sample_of(counted(), payload, PROMPT) for _ in range(2)]
    assert Batch(0, 0, samples).groups() == {"a": samples}


@pytest.mark.parametrize(
    "wrong",
    [
        {"uid": "a", "prompt_ids": [], "samples": 1, "max_tokens": 1},
        {"uid": "a", "prompt_ids": [1], "samples": 0, "max_tokens": 1},
        {"uid": "a", "prompt_ids": [1], "samples": 1, "max_tokens": 0},
        {"uid": "a", "prompt_ids": ["b"], "samples": 1, "max_tokens": 1},
        {"uid": "a", "prompt_ids": [1], "samples": 1, "max_tokens": 1, "tokens": 1},
    ],
)
def test_a_wrong_prompt_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, Prompt)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("uid", "u" * 257),
        ("uid", "a\nb"),
        ("uid", "a\n"),
        ("samples", 100_000_000),
        ("max_tokens", 10**30),
    ],
)
def test_external_prompt_is_bounded(field: str, value: object) -> None:
    """A hundred million samples were made before anybody asked whether they can be."""
    fields = {"uid": "a" * 256, "prompt_ids": [1], "samples": 2, "max_tokens": 9}
    assert msgspec.json.decode(msgspec.json.encode(fields), type=Prompt).samples == 2
    text = json.dumps({**fields, field: value}).encode()
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(text, type=Prompt)


def test_prompt_history_reaches_the_scheduler() -> None:
    again = Prompt("a@2", [1, 2, 3], 2, 10, prompt_key="a", history=[7, 9], expected_tokens=50)
    assert again.submitted == GroupSubmitted("a@2", 2, 3, 10, "a", (7, 9), 50)
    assert PROMPT.submitted == GroupSubmitted("a", 2, 3, 10)


def test_a_batch_is_balanced_by_tokens_over_ranks() -> None:
    whole = sample_of(counted(), TokenPayload([1], {}), PROMPT)

    def sample(uid: str, tokens: int) -> Sample:
        ids = list(range(tokens - 3))
        return msgspec.structs.replace(whole, uid=uid, prompt_ids=[1, 2, 3], response_ids=ids)

    lengths = {"a": [10, 90], "b": [50, 50], "c": [60, 40], "d": [20, 80]}
    samples = [sample(uid, tokens) for uid, some in lengths.items() for tokens in some]
    batch = Batch(0, 0, samples)
    for ranks, whole_groups in ((2, True), (4, True), (4, False), (1, False)):
        parts = batch.balanced(ranks, whole_groups=whole_groups)
        assert [sum(one.tokens for one in part) for part in parts] == [400 // ranks] * ranks
        flat = [id(one) for part in parts for one in part]
        assert sorted(flat) == sorted(map(id, samples))
        if whole_groups:
            uids = [{one.uid for one in part} for part in parts]
            assert sum(map(len, uids)) == len(lengths)
    assert [len(part) for part in Batch(0, 0, []).balanced(2)] == [0, 0]


def test_a_batch_names_lost_groups_by_reason() -> None:
    action = Deliver(3, 7, (), part=1, missing=2)
    batch = batch_of(action, [], [LostGroup("a", "no answer"), LostGroup("b", None)], {})
    assert batch == Batch(3, 7, [], [FailedGroup("a", "no answer")], 1, True, ["b"], 2)


def test_a_sample_has_its_reward_in_all_and_by_name() -> None:
    payload = TokenPayload([1], {})
    prompt = Prompt("a", [1], 1, 9)
    bare = sample_of(counted(), payload, prompt)
    assert (bare.reward, bare.rewards) == (None, {})
    worth = sample_of(counted(), payload, prompt, Reward(0.0, {"answer": 0.0}))
    assert (worth.reward, worth.rewards) == (0.0, {"answer": 0.0})


@given(st.lists(st.integers(0, 40_000), max_size=60), st.integers(1, 9))
def test_nothing_is_lost_and_no_two_sets_differ_by_more_than_the_heaviest(
    weights: list[int], count: int
) -> None:
    sets = balanced(weights, count)
    assert len(sets) == count
    assert sorted(place for one in sets for place in one) == list(range(len(weights)))
    assert all(one == sorted(one) for one in sets)
    totals = [sum(weights[place] for place in one) for one in sets]
    assert max(totals) - min(totals) <= max(weights, default=0)


@pytest.mark.parametrize(
    ("weights", "count", "totals"),
    [
        ([8, 7, 6, 5, 4], 2, [14, 16]),  # Karmarkar and Karp's own; 15 and 15 would be best
        ([8, 7, 6, 5, 4], 1, [30]),
        ([5, 5, 5, 5], 4, [5, 5, 5, 5]),
        ([3, 9], 3, [0, 3, 9]),
        ([], 2, [0, 0]),
    ],
)
def test_known_divisions(weights: list[int], count: int, totals: list[int]) -> None:
    sets = balanced(weights, count)
    assert sorted(sum(weights[place] for place in one) for one in sets) == totals


def test_a_long_list_is_divided_evenly() -> None:
    weights = [100 + 37 * number % 3001 for number in range(5000)]
    totals = [sum(weights[place] for place in one) for one in balanced(weights, 8)]
    assert max(totals) - min(totals) < 10


def test_dividing_over_no_ranks_is_refused() -> None:
    with pytest.raises(CallerError, match="at least one rank, not 0"):
        balanced([1], 0)


async def search(trajectory):
    return None


async def other(trajectory):
    return None


def test_tools_are_found_by_name():
    tools = NamedTools({"search": search})
    assert tools.name_of(search) == "search"
    assert tools.name_of(other) == ""
    assert tools.name_of(None) is None
    assert "search" in tools
    assert "other" not in tools
    assert tools.tool("search") is search


@pytest.mark.parametrize(
    ("name", "why"), [("", "lost with its process"), ("other", r"tools=\{'other': ...\} next time")]
)
def test_missing_tool_is_an_error(name, why):
    with pytest.raises(ToolGone, match=why):
        virtual_net.run(NamedTools({"search": search}).tool(name)(None))
