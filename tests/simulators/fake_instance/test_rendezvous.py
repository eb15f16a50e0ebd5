"""Ranks that meet: all of them, each once, or nobody goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from uuid import uuid4

import pytest

from rollout_sched.simulators.fake_instance.engine import LOOK_S, RankRange, Rendezvous

#: How often is looked before a wait counts as one that does not end.
LOOKS = 10

#: Takes a rank in a process of its own, and holds it until its input ends.
HOLD = """
import asyncio, sys
from rollout_sched.simulators.fake_instance.rendezvous import RankRange, Rendezvous
asyncio.run(Rendezvous().join(RankRange(sys.argv[1], 1, 1, 2)))
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def group() -> str:
    return uuid4().hex


async def hangs(joining: asyncio.Task[None]) -> bool:
    await asyncio.sleep(LOOKS * LOOK_S)
    return not joining.done()


def joining(
    group: str, first: int, count: int, world: int
) -> tuple[Rendezvous, asyncio.Task[None]]:
    member = Rendezvous()
    return member, asyncio.create_task(member.join(RankRange(group, first, count, world)))


def test_all_go_on_once_all_are_there(group: str) -> None:
    async def scene() -> None:
        one, first = joining(group, 1, 2, 4)
        assert await hangs(first)
        two, second = joining(group, 3, 1, 4)
        await asyncio.wait_for(asyncio.gather(first, second), 20)
        one.leave()
        two.leave()

    asyncio.run(scene())


def test_two_of_the_same_rank_hang(group: str) -> None:
    async def scene() -> None:
        one, first = joining(group, 1, 1, 3)
        two, second = joining(group, 1, 1, 3)
        assert await hangs(first)
        assert await hangs(second)
        for member, task in ((one, first), (two, second)):
            task.cancel()
            member.leave()

    asyncio.run(scene())


def test_groups_of_other_masters_do_not_meet(group: str) -> None:
    async def scene() -> None:
        one, first = joining(group, 1, 1, 3)
        two, second = joining(f"{group}:other", 2, 1, 3)
        assert await hangs(first)
        assert await hangs(second)
        for member, task in ((one, first), (two, second)):
            task.cancel()
            member.leave()

    asyncio.run(scene())


def test_who_joins_anew_or_leaves_gives_its_ranks_back(group: str) -> None:
    async def scene() -> None:
        member = Rendezvous()
        for _ in range(2):
            await asyncio.wait_for(member.join(RankRange(group, 1, 1, 2)), 20)
        member.leave()
        await asyncio.wait_for(Rendezvous().join(RankRange(group, 1, 1, 2)), 20)

    asyncio.run(scene())


def test_a_rank_of_a_process_that_has_ended_is_free(group: str) -> None:
    command = [sys.executable, "-c", HOLD, group]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None

    async def scene() -> None:
        member, task = joining(group, 1, 1, 2)
        assert await hangs(task)
        process.kill()
        process.wait()
        await asyncio.wait_for(task, 20)
        member.leave()

    try:
        assert process.stdout.readline() == f"there{os.linesep}".encode()
        asyncio.run(scene())
    finally:
        process.kill()
        process.communicate()
