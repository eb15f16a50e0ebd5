"""The simulated instance on an event loop, as the driver sees it."""

from __future__ import annotations

import asyncio
import itertools
import math
import time as clock
import time as time_clocked_instance
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rollout_sched.live.ports import InstanceError, Order, RequestRejected
from rollout_sched.simulators.fake_instance.answers import CountedOutput
from rollout_sched.simulators.fake_instance.instance import (
    Alarm,
    ClockedInstance,
    Pauses,
    RealtimeClock,
    RealtimeInstance,
)
from rollout_sched.simulators.instance.model import (
    CostModel,
    Ended,
    InstanceSpec,
    Outcome,
    SimRequest,
)
from rollout_sched.simulators.instance.sim_instance import SimInstance
from tests import virtual_loop
from tests.simulators.fake_instance.served import SPEC as SPEC_PAUSES

SECOND = CostModel(step_s=1.0, weights_s=0.0, token_s=0.0)
PROMPT = list(range(10))
GREEDY = {"temperature": 0, "logprobs": 0}


def make(length: int = 20, speed: float = 1.0, **settings: Any) -> RealtimeInstance:
    named = {key: settings.pop(key) for key in ("versioned_text",) if key in settings}
    defaults: dict[str, Any] = {"cost": SECOND, "kv_blocks": 1000, "block_size": 4}
    spec = InstanceSpec(**{**defaults, "max_num_seqs": 8, **settings})
    return RealtimeInstance(
        "one", spec, lambda order, response: length, speed=speed, version=1, **named
    )


def order(name: str = "a", token_ids: list[int] = PROMPT, **changes: Any) -> Order:
    fields = {"max_new_tokens": 1000, "salt": "v1", "sampling": GREEDY, **changes}
    return Order(name, token_ids, **fields)


def time() -> float:
    return asyncio.get_running_loop().time()


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    virtual_loop.run(scene())


async def test_an_answer_comes_when_the_model_says() -> None:
    one = make()
    output = await one.generate(order())
    assert time() == 20.0
    assert (output.finish, output.spans) == ("stop", ((1, 20),))
    assert len(output.token_ids) == 20
    assert output.logprobs is not None
    assert len(output.logprobs) == 20
    cut = await one.generate(order(max_new_tokens=5, sampling={"temperature": 0}))
    assert cut == CountedOutput(output.token_ids[:5], None, "length", ((1, 5),), 8)


async def test_speed_makes_the_seconds_shorter() -> None:
    one = make(speed=8.0)
    await asyncio.sleep(3.0)
    await one.generate(order())
    assert time() == 3.0 + 20.0 / 8


async def test_an_interrupted_request_resumes_its_text_and_finds_its_kv() -> None:
    whole = await make().generate(order())
    one, other = make(), make()
    started = time()
    task = asyncio.create_task(one.generate(order()))
    await asyncio.sleep(9.5)
    await one.abort("nobody")
    await one.abort("a")
    part = await task
    assert (part.finish, part.spans, time() - started) == ("abort", ((1, 9),), 10.0)
    for where, salt, cached in ((one, "v1", 16), (one, "v2", 0), (other, "v1", 0)):
        before = (await where.gauges()).cached_tokens
        rest = await where.generate(order("b", PROMPT + part.token_ids, salt=salt))
        assert rest.finish == "stop"
        assert part.token_ids + rest.token_ids == whole.token_ids
        assert part.logprobs is not None
        assert rest.logprobs is not None
        assert part.logprobs + rest.logprobs == whole.logprobs
        assert (await where.gauges()).cached_tokens - before == cached
    assert (await other.gauges()).reprefilled_tokens == 19


async def test_siblings_share_the_prompt_but_not_the_text() -> None:
    one = make()
    sampled = await asyncio.gather(*(one.generate(order(name, sampling={})) for name in "abcdefgh"))
    assert len({output.token_ids[1] for output in sampled}) == 8
    assert (await one.gauges()).cached_tokens == 7 * 8
    greedy = await asyncio.gather(*(one.generate(order(name)) for name in "abc"))
    assert greedy[0] == greedy[1] == greedy[2]


async def test_the_end_of_an_aborted_answer_takes_its_text_from_nobody() -> None:
    one = make()
    first = asyncio.create_task(one.generate(order("a")))
    await asyncio.sleep(2.5)
    await one.abort("a")
    second = asyncio.create_task(one.generate(order("b")))
    await first
    third = await one.generate(order("c"))
    assert third.token_ids == (await second).token_ids


async def test_cancelling_gives_the_slot_back() -> None:
    one = make(max_num_seqs=1)
    first = asyncio.create_task(one.generate(order("a")))
    second = asyncio.create_task(one.generate(order("b", [1, 2])))
    await asyncio.sleep(2.5)
    first.cancel()
    await second
    assert first.cancelled()
    assert time() == 3.0 + 20.0
    assert (await one.gauges()).running == 0


@pytest.mark.parametrize("clear_cache", [False, True])
async def test_pause_and_version_mark_the_tokens(clear_cache: bool) -> None:
    one = make()
    task = asyncio.create_task(one.generate(order()))
    await asyncio.sleep(3.5)
    await one.pause("keep", clear_cache)
    assert time() == 4.0
    frozen = await one.gauges()
    assert frozen.running == 1
    late = asyncio.create_task(one.generate(order("late", [7])))
    await asyncio.sleep(96.0)
    assert await one.gauges() == frozen
    await one.set_version(2)
    await one.resume()
    output = await task
    assert output.spans == ((1, 4), (2, 16))
    assert time() == 116.0
    assert (await one.gauges()).preemptions == clear_cache
    assert (await one.describe()).version == 2
    late.cancel()


async def test_pause_abort_returns_everything_first() -> None:
    one = make()
    tasks = [asyncio.create_task(one.generate(order(name))) for name in "ab"]
    await asyncio.sleep(5.5)
    await one.pause("abort", True)
    assert [task.result().finish for task in tasks if task.done()] == ["abort", "abort"]
    assert (await one.gauges()).running == 2  # as in vLLM: the last look before the pause
    await one.resume()
    assert (await one.gauges()).running == 0


async def test_pause_wait_finishes_what_runs() -> None:
    one = make()
    task = asyncio.create_task(one.generate(order()))
    await asyncio.sleep(5.5)
    await one.pause("wait", False)
    assert time() == 20.0
    assert task.done()
    assert (await one.gauges()).running == 0


async def test_a_stream_brings_every_token_once() -> None:
    one = make()
    seen: list[tuple[float, int]] = []
    ids: list[int] = []
    values: list[float] = []

    def note(new: Any, logprobs: Any) -> None:
        seen.append((time(), len(new)))
        ids.extend(new)
        values.extend(logprobs)

    output = await one.generate(order(stream_every=8), note)
    assert seen == [(1.0, 1), (9.0, 8), (17.0, 8), (20.0, 3)]
    assert ids == output.token_ids
    assert values == output.logprobs

    seen.clear()
    task = asyncio.create_task(one.generate(order("b", stream_every=16), note))
    await asyncio.sleep(5.5)
    await one.abort("b")
    await task
    assert seen == [(21.0, 1), (26.0, 4)]


async def test_text_may_depend_on_the_version() -> None:
    one, plain = make(versioned_text=True), await make().generate(order())
    streamed: list[int] = []
    started = time()
    task = asyncio.create_task(
        one.generate(order(stream_every=7), lambda ids, _: streamed.extend(ids))
    )
    await asyncio.sleep(10.5)
    await one.set_version(2)
    output = await task
    assert time() - started == 20.0
    assert output.spans == ((1, 11), (2, 9))
    assert output.token_ids == streamed
    assert output.token_ids[0] == plain.token_ids[0]
    assert not set(output.token_ids[1:]) & set(plain.token_ids[1:])
    one = make(versioned_text=True)
    await one.set_version(2)
    fresh = await one.generate(order())
    assert fresh.token_ids[11:] == output.token_ids[11:]
    assert fresh.token_ids[1:11] != output.token_ids[1:11]


@pytest.mark.parametrize("bad", [[], [-4], ["x"], list(range(131_072))])
async def test_bad_requests_are_rejected(bad: list[int]) -> None:
    with pytest.raises(RequestRejected, match=r"token|vocabulary"):
        await make().generate(order("a", bad))


async def test_closing_fails_waiting_requests() -> None:
    one = make()
    task = asyncio.create_task(one.generate(order()))
    await asyncio.sleep(2.5)
    pause = asyncio.create_task(one.pause("wait", True))
    await asyncio.sleep(0.0)
    await one.close()
    for waiting in (task, pause, one.generate(order()), one.abort("a"), one.gauges()):
        with pytest.raises(InstanceError, match="closed"):
            await waiting


async def test_describe() -> None:
    described = await make(max_model_len=500).describe()
    assert (described.slots, described.kv_tokens, described.max_model_len) == (8, 4000, 500)
    assert described.version == 1


async def test_the_cache_can_be_cleared_while_nothing_is_held() -> None:
    one = make()
    await one.generate(order())
    assert one.clocked.clear_cache(preempt=False)
    task = asyncio.create_task(one.generate(order()))
    await asyncio.sleep(2.5)
    assert not one.clocked.clear_cache(preempt=False)
    assert one.clocked.clear_cache(preempt=True)
    one.abort_all()
    assert (await task).finish == "abort"
    gauges = await one.gauges()
    assert (gauges.cached_tokens, gauges.running) == (0, 0)


async def test_a_real_loop_runs_the_instance() -> None:
    one = make(speed=200.0)
    chunks: list[int] = []
    started = time()
    output = await one.generate(order(stream_every=8), lambda ids, _: chunks.append(len(ids)))
    assert time() - started >= 0.09
    assert len(output.token_ids) == sum(chunks) == 20


@pytest.mark.parametrize("preempts", [False, True])
async def test_late_reports_match_the_generated_tokens(preempts: bool) -> None:
    """The loop was busy, so chunks are told after the version has changed whose tokens came before:
    together they are the answer, token for token."""
    one = make(1000, speed=1000.0, versioned_text=True)
    streamed: list[int] = []
    asked = order(stream_every=4)
    answer = asyncio.create_task(one.generate(asked, lambda ids, _: streamed.extend(ids)))
    async with asyncio.timeout(60):
        while len(streamed) < 5:
            await asyncio.sleep(0.001)
    for version in (2, 3):
        clock.sleep(0.02)
        if preempts:
            one.clocked.clear_cache(preempt=True)
        await one.set_version(version)
        await asyncio.sleep(0.01)
    await one.abort("a")
    output = await answer
    assert [version for version, _ in output.spans] == [1, 2, 3]
    assert streamed == output.token_ids


async def test_at_another_speed_the_rest_takes_another_time() -> None:
    one = make()
    asking = asyncio.create_task(one.generate(order()))
    await asyncio.sleep(10.0)
    one.clocked.set_speed(5.0)
    await asking
    assert time() == 10.0 + 10.0 / 5


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


async def test_progress_is_reported_until_the_end_or_unsubscription() -> None:
    heard = Heard()
    heard.here.submit(request(tokens=4), 2, heard.progress)
    await asyncio.sleep(9.0)
    assert heard.made == [(1.0, 1), (3.0, 3)]
    heard.here.submit(request(2), 2, heard.progress)
    heard.here.stop_telling(2)
    await asyncio.sleep(9.0)
    assert (len(heard.made), len(heard.ends)) == (2, 2)


async def test_catching_up_tells_what_was_due_and_a_closed_one_tells_nothing() -> None:
    heard = Heard()
    heard.here.submit(request())
    heard.here.submit(request(2, tokens=50))
    heard.here.close()
    await asyncio.sleep(7.0)
    assert heard.told == []
    await heard.here.catch_up()
    assert [attempt for _, attempt, _ in heard.ends] == [1]


async def test_an_outcome_that_falls_due_while_gauges_are_read_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A real clock moves between any two looks at it; here it takes two more seconds each time."""

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


async def test_an_outcome_that_is_due_when_the_cache_is_cleared_is_reported() -> None:
    heard = Heard(speed=20.0)
    heard.here.submit(request(tokens=4))
    time_clocked_instance.sleep(0.3)  # six simulated seconds, in which the loop runs no callback
    assert heard.here.clear_cache(preempt=False)
    await asyncio.sleep(1.0)
    assert [attempt for _, attempt, _ in heard.ends] == [1]


async def test_time_runs_as_fast_as_told_and_never_back() -> None:
    clock = RealtimeClock(4.0)
    await asyncio.sleep(2.0)
    assert clock.tick() == 8.0
    assert clock.reach(9.0) == 9.0  # a timer that came early
    assert clock.tick() == 9.0
    await asyncio.sleep(1.0)
    assert clock.reach(9.0) == 12.0


async def test_another_speed_continues_from_the_current_time() -> None:
    clock = RealtimeClock(4.0)
    await asyncio.sleep(2.0)
    clock.set_speed(0.5)
    assert clock.tick() == 8.0
    await asyncio.sleep(2.0)
    assert clock.tick() == 9.0
    clock.set_speed(10.0)
    await asyncio.sleep(1.0)
    assert clock.tick() == 19.0


async def test_an_alarm_rings_when_due_and_not_once_it_is_closed() -> None:
    due = [math.inf]
    rung: list[float] = []
    alarm = Alarm(RealtimeClock(2.0), lambda: due[0], rung.append)
    alarm.change()
    await asyncio.sleep(1.0)
    assert rung == []
    due[0] = 10.0
    alarm.change()
    await asyncio.sleep(1.0)
    due[0] = 6.0  # earlier than planned
    alarm.change()
    await asyncio.sleep(1.5)
    assert rung == [6.0]
    await asyncio.sleep(9.0)
    assert rung == [6.0]
    due[0] = 40.0
    alarm.change()
    await asyncio.sleep(0.0)
    alarm.close()
    alarm.change()
    await asyncio.sleep(30.0)
    assert rung == [6.0]


def running(attempt: int) -> SimRequest:
    return SimRequest(attempt, 4, 100, 100, "prompt", 4, attempt)


async def test_gauges_stand_still_from_when_a_pause_is_asked_for() -> None:
    engine = SimInstance(SPEC_PAUSES)
    engine.submit(running(1), 0.0)
    engine.advance(2.5)
    pauses = Pauses(engine)
    asked = pauses.ask("keep")
    engine.submit(running(2), 2.5)
    engine.advance(9.5)
    assert pauses.gauges().running == 1
    assert not asked.done()
    pauses.confirm("keep")
    assert asked.done()
    assert pauses.gauges().running == 1
    pauses.end()
    assert pauses.gauges().running == 2


async def test_gauges_move_until_a_waiting_pause_takes_effect() -> None:
    engine = SimInstance(SPEC_PAUSES)
    pauses = Pauses(engine)
    pauses.ask("wait")
    engine.submit(running(1), 0.0)
    engine.advance(2.5)
    assert pauses.gauges().running == 1


async def test_pauses_of_two_modes_differ_and_fail_when_closed() -> None:
    pauses = Pauses(SimInstance(SPEC_PAUSES))
    wait, keep, other = pauses.ask("wait"), pauses.ask("keep"), pauses.ask("keep")
    pauses.confirm("keep")
    assert [asked.done() for asked in (wait, keep, other)] == [False, True, False]
    pauses.fail(InstanceError("closed"))
    for asked in (wait, other):
        with pytest.raises(InstanceError):
            await asked
    await keep
