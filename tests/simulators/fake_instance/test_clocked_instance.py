"""A simulated instance in real time: what it says, and when. Tokens: test_realtime_instance."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rollout_sched.simulators.fake_instance.instance import ClockedInstance
from rollout_sched.simulators.instance.model import (
    CostModel,
    Ended,
    InstanceSpec,
    Outcome,
    Paused,
    SimRequest,
)
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.replay import virtual_loop

SECOND = CostModel(step_s=1.0, weights_s=0.0, token_s=0.0)
SPEC = InstanceSpec(cost=SECOND, kv_blocks=100, block_size=4, max_num_seqs=8)


class Heard:
    """An instance, and when it said what."""

    def __init__(self, speed: float = 1.0) -> None:
        self.told: list[tuple[float, Outcome]] = []
        self.made: list[tuple[float, int]] = []
        self.here = ClockedInstance(SimInstance(SPEC), speed, self._note)

    def _note(self, outcome: Outcome) -> None:
        self.told.append((asyncio.get_running_loop().time(), outcome))

    def progress(self, tokens: int, step: int) -> None:
        self.made.append((asyncio.get_running_loop().time(), tokens))

    @property
    def ends(self) -> list[tuple[float, int, str]]:
        """When which attempt ended, and why."""
        return [(at, e.attempt, e.reason) for at, e in self.told if isinstance(e, Ended)]


def request(attempt: int = 1, tokens: int = 6) -> SimRequest:
    return SimRequest(attempt, 8, tokens, 100, f"p{attempt}", 8, f"s{attempt}")


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    virtual_loop.run(scene())


@pytest.mark.parametrize(("speed", "seconds"), [(1.0, 6.0), (2.0, 3.0)])
def test_what_ends_is_told_when_it_ends(speed: float, seconds: float) -> None:
    async def scene() -> None:
        heard = Heard(speed)
        heard.here.submit(request())
        await asyncio.sleep(10.0)
        assert heard.ends == [(seconds, 1, "stop")]

    play(scene)


def test_progress_is_told_until_it_ends_or_nobody_wants_it() -> None:
    async def scene() -> None:
        heard = Heard()
        heard.here.submit(request(tokens=4), 2, heard.progress)
        await asyncio.sleep(9.0)
        assert heard.made == [(1.0, 1), (3.0, 3)]
        heard.here.submit(request(2), 2, heard.progress)
        heard.here.stop_telling(2)
        await asyncio.sleep(9.0)
        assert (len(heard.made), len(heard.ends)) == (2, 2)

    play(scene)


def test_an_abort_and_a_pause_take_effect_with_the_step_under_way() -> None:
    async def scene() -> None:
        heard = Heard()
        heard.here.submit(request())
        heard.here.submit(request(2))
        await asyncio.sleep(1.5)
        heard.here.abort(1)
        heard.here.pause("keep", False)
        await asyncio.sleep(5.0)
        assert heard.ends == [(2.0, 1, "abort")]
        assert [at for at, outcome in heard.told if isinstance(outcome, Paused)] == [2.0]
        heard.here.resume()
        await asyncio.sleep(9.0)
        assert [(attempt, reason) for _, attempt, reason in heard.ends[1:]] == [(2, "stop")]

    play(scene)


def test_catching_up_tells_what_was_due_and_a_closed_one_tells_nothing() -> None:
    async def scene() -> None:
        heard = Heard()
        heard.here.submit(request())
        heard.here.submit(request(2, tokens=50))
        heard.here.close()
        await asyncio.sleep(7.0)
        assert heard.told == []
        await heard.here.catch_up()
        assert [attempt for _, attempt, _ in heard.ends] == [1]

    play(scene)


def test_the_cache_is_cleared_where_no_block_is_in_use() -> None:
    async def scene() -> None:
        heard = Heard()
        assert heard.here.clear_cache(preempt=False)
        heard.here.submit(request())
        await asyncio.sleep(1.5)
        assert not heard.here.clear_cache(preempt=False)
        assert heard.here.clear_cache(preempt=True)

    play(scene)


def test_an_outcome_that_falls_due_while_gauges_are_read_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A real clock moves between any two looks at it; here it takes two more seconds each time."""

    async def scene() -> None:
        heard = Heard()
        heard.here.submit(request(tokens=4))
        await asyncio.sleep(2.0)
        loop = asyncio.get_running_loop()
        looks = itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(loop, "time", lambda: 3.0 + 2 * next(looks))
            await heard.here.catch_up()
        await asyncio.sleep(9.0)
        assert [attempt for _, attempt, _ in heard.ends] == [1]

    play(scene)


def test_an_outcome_that_is_due_when_the_cache_is_cleared_is_reported() -> None:
    async def scene() -> None:
        heard = Heard(speed=20.0)
        heard.here.submit(request(tokens=4))
        time.sleep(0.3)  # six simulated seconds, in which the loop runs no callback
        assert heard.here.clear_cache(preempt=False)
        await asyncio.sleep(1.0)
        assert [attempt for _, attempt, _ in heard.ends] == [1]

    asyncio.run(scene())
