"""The prompts of a run, from their submission until their batch has arrived."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import SubmissionsClosed
from rollout_sched.live.driver import Driver
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.requests.trajectories import TrajectoryPayload
from rollout_sched.live.trainer.records import StoredPrompt, decoded
from rollout_sched.live.trainer.samples import LostGroup, NamedTools, Prompt
from rollout_sched.live.trainer.submissions import (
    AcknowledgedGroups,
    SamplePayloads,
    Submissions,
    check_prompt,
    digest_of,
)
from rollout_sched.store.errors import StoreFull
from tests.core.told import make_scheduler

PROMPT = Prompt("a", [1, 2], 3, 9)


async def search(trajectory):
    return None


class Stored:
    """Says what it was told, and whether there is room."""

    def __init__(self):
        self.told = []
        self.full = False

    def check_room(self):
        if self.full:
            raise StoreFull("the disk is full")

    def submitted(self, uid, fact, tokens):
        stored = decoded(fact, StoredPrompt)
        assert not stored.judged
        self.told.append((uid, stored.tool_name if stored.tool else None))

    def lost(self, group, batch=None):
        self.told.append((group.uid, group.reason, batch))

    def acknowledged(self, batch): ...

    def remember(self, batch, digests): ...


@asynccontextmanager
async def submissions(stored=None):
    driver = Driver(make_scheduler(1))
    payloads = SamplePayloads(0, driver.max_model_len)
    tools = NamedTools({"search": search})
    try:
        yield Submissions(driver, payloads, lengths=None, stored=stored, rewards=None, tools=tools)
    finally:
        await driver.close()


async def test_a_uid_is_taken_once_and_stands_for_one_prompt():
    stored = Stored()
    async with submissions(stored) as here:
        for _ in range(2):
            here.submit([PROMPT], None)
        assert (here.open_samples, stored.told) == (3, [("a", None)])
        assert here.known("a") == PROMPT
        other = Prompt("a", [1, 2], 2, 8)
        with pytest.raises(CallerError, match="'a' was already submitted with other values"):
            here.submit([other], None)
        assert here.known("a") == PROMPT
        assert here.known("b") is None


async def test_refused_prompt_is_not_kept():
    async with submissions() as here:
        with pytest.raises(CallerError, match="n is not allowed there"):
            here.submit([Prompt("b", [1], 1, 9, {"n": 2})], None)
        assert (here.open_samples, here.prompts) == (0, {})


async def test_tool_name_is_stored():
    async def nameless(trajectory): ...

    stored = Stored()
    async with submissions(stored) as here:
        here.submit([PROMPT], search)
        here.submit([Prompt("b", [1], 1, 9)], nameless)
        assert stored.told == [("a", "search"), ("b", "")]


async def test_a_full_store_takes_nothing_new():
    stored = Stored()
    stored.full = True
    async with submissions(stored) as here:
        with pytest.raises(StoreFull):
            here.submit([PROMPT], None)
        assert here.prompts == {}


async def test_lost_group_is_reported_once_and_may_be_resubmitted():
    stored = Stored()
    async with submissions(stored) as here:
        filtered = Prompt("b", [1], 1, 9)
        here.submit([PROMPT, filtered], None)
        here.fail("a", ValueError("no"))
        here.filter("b")
        assert here.open_samples == 0
        told = [LostGroup("a", "ValueError: no"), LostGroup("b", None, digest_of(filtered))]
        assert here.lost == told
        assert here.summary() == {"failed": {"a": "ValueError: no"}, "filtered": ["b"]}
        assert here.take_lost(4) == told
        assert here.take_lost(5) == []
        assert stored.told[-2:] == [("a", "ValueError: no", 4), ("b", None, 4)]
        assert here.known("a") is None
        here.acknowledged(4)
        assert here.submit([filtered], None) == ["b"]
        assert [here.is_new("a"), here.is_new("b")] == [True, False]


def test_groups_are_forgotten_by_batches_but_none_of_the_last_ones():
    groups = AcknowledgedGroups(4)
    for batch in range(5):
        forgotten = groups.add(batch, {f"{batch}.{n}": n for n in range(batch)})
        assert forgotten == {3: [0, 1], 4: [2, 3]}.get(batch, [])
    assert [groups.digest(f"4.{n}") for n in range(4)] == [0, 1, 2, 3]
    assert "3.0" not in groups


def test_a_prompt_has_one_digest():
    """In any order of its parameters; what cannot be written does not count."""

    def digest(**fields):
        return digest_of(msgspec.structs.replace(PROMPT, **fields))

    one, other = {"top_p": 0.5, "top_k": 3}, {"top_k": 3, "top_p": 0.5}
    assert digest(sampling=one) == digest(sampling=other) != digest()
    assert digest(samples=2) != digest()
    assert digest(extra={"x": object()}) == digest(extra={"x": 10**30}) == digest()


async def test_repeated_failure_is_kept_until_each_batch_is_acknowledged():
    async with submissions(Stored()) as here:
        for number in range(2):
            here.fail("a", ValueError("no"))
            here.fail("a", ValueError("never"))
            assert here.take_lost(number) == [LostGroup("a", "ValueError: never")]
        here._driver.tell(SubmissionsClosed())
        here.acknowledged(1)
        here.submit([PROMPT], None)  # who holds the first batch may not have heard of it
        assert here.prompts == {}
        here.acknowledged(0)
        with pytest.raises(CallerError, match="closed"):
            here.submit([PROMPT], None)


def check(*, max_model_len: int = 0, turns: bool = False, **fields: Any) -> None:
    given: dict[str, Any] = {"uid": "a", "prompt_ids": [1] * 60, "samples": 2, "max_tokens": 50}
    check_prompt(Prompt(**(given | fields)), max_model_len=max_model_len, turns=turns)


@pytest.mark.parametrize("most", [0, 110])
def test_fitting_or_unbounded_prompt_is_accepted(most: int) -> None:
    check(max_model_len=most)


def test_oversized_prompt_is_refused_with_the_limit() -> None:
    with pytest.raises(CallerError, match=r"'a': .*60 \+ 50 tokens.* is 100; max_tokens can be 40"):
        check(max_model_len=100)
    with pytest.raises(CallerError, match="leaves no room in max_model_len, 60; shorten it"):
        check(max_model_len=60)


def test_turns_end_when_no_room_is_left() -> None:
    check(max_model_len=61, turns=True)
    with pytest.raises(CallerError, match="leaves no room"):
        check(max_model_len=60, turns=True)


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"temprature": 1.0}, "has no parameter 'temprature'; did you mean \"temperature\"?"),
        ({"zzz": 1}, "has no parameter 'zzz'"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": float("-inf")}, "top_p is -inf"),
        ({"seed": 2**63}, "seed has more than 64 bits"),
        ({"n": 4}, "set Prompt.samples"),
        ({"max_tokens": 4}, "set Prompt.max_tokens"),
    ],
)
def test_ignored_sampling_parameters_are_refused(sampling: dict[str, Any], says: str) -> None:
    for where in ({"sampling": sampling}, {"each": [{}, sampling]}):
        with pytest.raises(CallerError) as caught:
            check(**where)
        assert says in str(caught.value)


PROMPT_SAMPLE_PAYLOADS = Prompt(
    "a", [1, 2], 2, 9, {"temperature": 1.0}, each=[{"seed": 1}, {"seed": 2}]
)


async def tool(trajectory):
    return None


def test_each_sample_is_drawn_as_its_prompt_says():
    payloads = SamplePayloads(4, lambda: 0)
    payload = payloads.new(PROMPT_SAMPLE_PAYLOADS, 1)
    assert type(payload) is TokenPayload
    assert payload.sampling == {"temperature": 1.0, "seed": 2}
    assert (payload.prompt_ids, payload.stream_every) == ([1, 2], 4)


def test_prompt_with_a_tool_is_a_trajectory():
    payloads = SamplePayloads(0, lambda: 0)
    payload = payloads.new(PROMPT_SAMPLE_PAYLOADS, 0, tool)
    assert isinstance(payload, TrajectoryPayload)


@pytest.mark.parametrize(
    "fields",
    [
        {"uid": "a\ud800"},
        {"prompt_key": "\ud800"},
        {"sampling": {"seed": "x"}},
        {"sampling": {"min_tokens": 1.5}},
        {"each": [{}, {"seed": [1]}]},
    ],
)
async def test_a_prompt_that_cannot_be_written_is_refused(fields):
    async with submissions() as here:
        with pytest.raises(CallerError, match="group"):
            here.submit([msgspec.structs.replace(PROMPT, **fields)], None)
        assert not here.prompts


@pytest.mark.parametrize("extra", [object(), 10**30, "\ud800", {"a": {1, 2}.__iter__()}])
async def test_a_prompt_that_cannot_be_stored_is_refused_and_not_taken(extra):
    """The group was taken all the same, and its samples were lost at a restart."""
    stored = Stored()
    async with submissions(stored) as here:
        with pytest.raises(CallerError, match="it cannot be stored"):
            here.submit([msgspec.structs.replace(PROMPT, extra={"x": extra})], None)
        assert not here.prompts
        assert not stored.told
        here.submit([PROMPT], None)
        assert stored.told == [("a", None)]


def test_samples_of_one_seed_have_seeds_of_their_own():
    prompt = Prompt("a", [1], 3, 9, sampling={"seed": 7}, each=[{}, {"seed": 1}])
    assert [prompt.sampling_of(index)["seed"] for index in range(4)] == [7, 1, 9, 1]
    assert Prompt("a", [1], 3, 9, sampling={"seed": None}).sampling_of(2) == {"seed": None}
