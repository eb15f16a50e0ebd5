"""The prompts of a run, from their submission until their batch has arrived."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.core.model.events import SubmissionsClosed
from rollout_sched.live.driver import Driver
from rollout_sched.live.trainer.samples import LostGroup, NamedTools, Prompt
from rollout_sched.live.trainer.submissions import SamplePayloads, Submissions
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

    def submitted(self, prompt, tool, *, judged):
        assert not judged
        self.told.append((prompt.uid, tool))

    def lost(self, group, batch=None):
        self.told.append((group.uid, group.reason, batch))


@asynccontextmanager
async def submissions(stored=None):
    driver = Driver(make_scheduler(1))
    payloads = SamplePayloads(0, None, driver.max_model_len)
    tools = NamedTools({"search": search})
    try:
        yield Submissions(driver, payloads, lengths=None, stored=stored, rewards=None, tools=tools)
    finally:
        await driver.close()


def test_a_uid_is_taken_once_and_stands_for_one_prompt():
    async def scene():
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

    asyncio.run(scene())


def test_what_cannot_be_is_not_here():
    async def scene():
        async with submissions() as here:
            with pytest.raises(CallerError, match="n is not allowed there"):
                here.submit([Prompt("b", [1], 1, 9, {"n": 2})], None)
            assert (here.open_samples, here.prompts) == (0, {})

    asyncio.run(scene())


def test_the_store_hears_the_name_of_a_tool():
    async def scene():
        async def nameless(trajectory): ...

        stored = Stored()
        async with submissions(stored) as here:
            here.submit([PROMPT], search)
            here.submit([Prompt("b", [1], 1, 9)], nameless)
            assert stored.told == [("a", "search"), ("b", "")]

    asyncio.run(scene())


def test_a_full_store_takes_nothing_new():
    async def scene():
        stored = Stored()
        stored.full = True
        async with submissions(stored) as here:
            with pytest.raises(StoreFull):
                here.submit([PROMPT], None)
            assert here.prompts == {}

    asyncio.run(scene())


def test_what_is_lost_is_told_once_and_may_be_submitted_again():
    async def scene():
        stored = Stored()
        async with submissions(stored) as here:
            here.submit([PROMPT, Prompt("b", [1], 1, 9)], None)
            here.fail("a", ValueError("no"))
            here.filter("b")
            assert here.open_samples == 0
            told = [LostGroup("a", "ValueError: no"), LostGroup("b", None)]
            assert here.lost == told
            assert here.told() == {"failed": {"a": "ValueError: no"}, "filtered": ["b"]}
            assert here.take_lost(4) == told
            assert here.take_lost(5) == []
            assert stored.told[-2:] == [("a", "ValueError: no", 4), ("b", None, 4)]
            assert here.known("a") is None

    asyncio.run(scene())


def test_a_group_that_fails_again_is_known_to_be_lost_until_each_batch_has_arrived():
    async def scene():
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

    asyncio.run(scene())
