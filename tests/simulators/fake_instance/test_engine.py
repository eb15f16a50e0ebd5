"""The engine behind the server, on a virtual loop."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from uuid import uuid4

import pytest

from rollout_sched.live.ports import Order
from rollout_sched.simulators.fake_instance.engine import (
    POLL_S,
    Engine,
    EngineSettings,
    RankRange,
    Rendezvous,
)
from rollout_sched.simulators.fake_instance.requests import Refusal
from tests.simulators.fake_instance.served import SPEC

ORDER = Order("a", [1, 2, 3], 100, "", {"temperature": 0, "ignore_eos": True})


async def test_a_restart_is_a_new_life() -> None:
    engine = Engine(EngineSettings(SPEC))
    started = engine.started_at
    await engine.weights.set_label("7")
    task = asyncio.create_task(engine.generate(ORDER))
    await asyncio.sleep(5.5)
    engine.weights.tear("on purpose")
    await engine.restart()
    with pytest.raises(Refusal):
        await task
    assert engine.unanswered == 0
    assert engine.started_at > started
    assert engine.weights.label == "default"
    assert len((await engine.generate(ORDER)).token_ids) == 100
    assert engine.finished["length"] == 1


async def test_an_ended_server_reports_its_end_while_paused() -> None:
    engine = Engine(EngineSettings(SPEC))
    answer = asyncio.create_task(engine.generate(ORDER))
    await asyncio.sleep(1)
    await engine.weights.init_transfer()
    engine.weights.start_update()
    await engine.resume()
    assert engine.dead
    with pytest.raises(Refusal):
        await answer
    await engine.get_stuck()
    with pytest.raises(Refusal):
        await engine.generate(ORDER)


async def test_loading_weights_takes_simulated_time() -> None:
    engine = Engine(EngineSettings(SPEC, speed=4.0, update_s=10.0))
    await engine.weights.reload(None)
    assert asyncio.get_running_loop().time() == 2.5


async def test_labels_make_other_text_if_wanted() -> None:
    texts = {}
    for versioned in (False, True):
        engine = Engine(EngineSettings(SPEC, versioned_text=versioned))
        seen = []
        for label in ("1", "2", "step-3", "1"):
            await engine.weights.set_label(label)
            output = await engine.generate(ORDER)
            assert [engine.weights.label_of(version) for version, _ in output.spans] == [label]
            seen.append(tuple(output.token_ids))
        assert seen[0] == seen[3]
        texts[versioned] = len(set(seen))
    assert texts == {False: 1, True: 3}


async def test_weights_are_half_loaded_while_an_update_lasts_and_after_one_that_failed() -> None:
    weights = Engine(EngineSettings(SPEC)).weights
    with pytest.raises(Refusal, match="not configured"):
        weights.start_update()
    await weights.init_transfer()
    with pytest.raises(Refusal, match="not started"):
        await weights.update()
    assert not weights.half_loaded
    weights.start_update()
    with pytest.raises(Refusal, match="already started"):
        weights.start_update()
    await weights.update()
    assert weights.half_loaded
    await weights.finish_update("17")
    assert (weights.label, weights.half_loaded) == ("17", False)
    with pytest.raises(Refusal, match="no weights at"):
        await weights.reload("/nowhere/at/all")
    assert weights.half_loaded


#: How often is looked before a wait counts as one that does not end.
LOOKS = 10

#: Takes a rank in a process of its own, and holds it until its input ends.
HOLD = """
import asyncio, sys
from rollout_sched.simulators.fake_instance.engine import RankRange, Rendezvous
asyncio.run(Rendezvous().join(RankRange(sys.argv[1], 1, 1, 2)))
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def group() -> str:
    return uuid4().hex


async def hangs(joining: asyncio.Task[None]) -> bool:
    await asyncio.sleep(LOOKS * POLL_S)
    return not joining.done()


def joining(
    group: str, first: int, count: int, world: int
) -> tuple[Rendezvous, asyncio.Task[None]]:
    member = Rendezvous()
    return member, asyncio.create_task(member.join(RankRange(group, first, count, world)))


def test_a_group_proceeds_once_all_ranks_joined(group: str) -> None:
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


def test_rejoining_and_leaving_free_ranks(group: str) -> None:
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
