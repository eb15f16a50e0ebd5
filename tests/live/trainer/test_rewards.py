"""Samples judged as they finish, and groups once they are whole: on time, once, and for what they
still are."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Coroutine, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rollout_sched.config import ConfigError, parse_policy
from rollout_sched.core.model.events import (
    BatchRequested,
    GroupJudged,
    GroupSubmitted,
    WeightsPublished,
)
from rollout_sched.core.model.model import DeliveredSample, GroupState
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import PayloadOf, RequestRejected
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.settings import Settings
from rollout_sched.live.trainer.rewards import (
    RewardFailed,
    RewardFunction,
    RewardSettings,
    nonzero_variance,
    reward_function_of,
    reward_settings_of,
)
from rollout_sched.live.trainer.samples import Reward, Sample
from tests import virtual_loop, virtual_net
from tests.core.told import make_scheduler
from tests.live.scripted import Scripted, until


class Judge:
    """Answers when a test says so; keeps what it says."""

    def __init__(self) -> None:
        self.asked: dict[str, asyncio.Future[Any]] = {}
        self.cancelled: list[str] = []
        self.known: dict[str, Any] = {}
        self.keep: Any = True
        self.stubborn = False
        self.seen: list[list[int]] = []

    async def judge(self, sample: DeliveredSample, payload_of: PayloadOf) -> Any:
        payload: Any = payload_of(sample)
        self.seen.append(payload.response_ids)
        answer = self.asked[sample.request] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled.append(sample.request)
            if self.stubborn:
                return "too late"
            raise

    def note(self, sample: DeliveredSample, worth: Any) -> None:
        self.known[sample.request] = worth

    def forget(self, request: str) -> None:
        self.known.pop(request, None)

    async def keeps(self, samples: Sequence[DeliveredSample], payload_of: PayloadOf) -> bool:
        if isinstance(self.keep, Exception):
            raise self.keep
        return bool(self.keep)

    async def answer(self, request: str, worth: Any) -> None:
        await until(lambda: request in self.asked)
        answer = self.asked[request]
        if isinstance(worth, Exception):
            answer.set_exception(worth)
        else:
            answer.set_result(worth)


class Stage:
    """A driver with groups of two samples that are judged."""

    def __init__(self, **roles: Any) -> None:
        self.instance, self.judge = Scripted(), Judge()
        self.delivered: list[str] = []
        self.failed: dict[str, Exception | None] = {}
        self.filtered: list[str] = []
        self.told: list[Any] = []
        self.driver = Driver(
            make_scheduler(**roles),
            settings=Settings(poll_s=1000.0),
            observers=[lambda now, event, actions: self.told.append(event)],
            on_deliver=lambda action, _: self.delivered.extend(s.request for s in action.samples),
            on_group_failed=self.failed.__setitem__,
        )
        self.driver.front.endings.on_group_filtered = self.filtered.append
        self.driver.judge_by(self.judge)

    async def __aenter__(self) -> Stage:
        await self.driver.add_instance(self.instance)
        self.driver.tell(BatchRequested())
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.driver.close()
        await asyncio.sleep(0)

    def submit(self, group: str = "a") -> None:
        def payload(index: int) -> TokenPayload:
            return TokenPayload([1], {})

        self.driver.submit_group(GroupSubmitted(group, 2, 1, 9, judged=True), payload)

    @property
    def judgements(self) -> list[GroupJudged]:
        return [event for event in self.told if isinstance(event, GroupJudged)]

    @property
    def at_work(self) -> int:
        assert self.driver.judging is not None
        return len(self.driver.judging)


async def test_a_sample_is_judged_as_it_finishes_and_the_group_when_all_are() -> None:
    async with Stage() as stage:
        stage.submit()
        await stage.instance.answer(1, [7, 8])
        await stage.judge.answer("a/1", 1.0)
        await until(lambda: stage.judge.known == {"a/1": 1.0})
        assert stage.judge.seen == [[7, 8]]
        await stage.instance.answer(0, [9])
        await until(lambda: "a/0" in stage.judge.asked)
        assert not stage.driver.view.in_flight, "it holds no slot"
        assert stage.driver.view.groups(GroupState.JUDGING) == 1
        assert not stage.delivered
        await stage.judge.answer("a/0", 2.0)
        await until(lambda: len(stage.delivered) == 2)
        assert [event.verdict for event in stage.judgements] == ["kept"]
        assert not stage.at_work


async def test_rejected_group_is_filtered() -> None:
    async with Stage() as stage:
        stage.judge.keep = False
        stage.submit()
        for number in range(2):
            await stage.instance.answer(number, [7])
            await stage.judge.answer(f"a/{number}", 0.0)
        await until(lambda: stage.filtered == ["a"])
        assert not stage.failed
        assert not stage.judge.known


async def test_failed_judgement_fails_the_group_with_the_reason() -> None:
    """At once when it is whole: what the siblings are worth is not waited for."""
    async with Stage() as stage:
        stage.submit()
        await stage.instance.answer(0, [7])
        await stage.instance.answer(1, [8])
        why = OSError("the grader is down")
        await stage.judge.answer("a/1", why)
        await until(lambda: stage.failed == {"a": why})
        await until(lambda: stage.judge.cancelled == ["a/0"])
        assert not stage.filtered
        assert not stage.at_work


async def test_a_filter_that_raises_fails_the_group() -> None:
    async with Stage() as stage:
        stage.judge.keep = why = ValueError("no rewards")
        stage.submit()
        for number in range(2):
            await stage.instance.answer(number, [7])
            await stage.judge.answer(f"a/{number}", 0.0)
        await until(lambda: stage.failed == {"a": why})


async def test_a_group_that_fails_takes_its_judgements_with_it() -> None:
    """Even those that go on although they are cancelled: what they say is heard by nobody."""
    async with Stage() as stage:
        stage.judge.stubborn = True
        stage.submit()
        await stage.instance.answer(0, [7])
        await until(lambda: "a/0" in stage.judge.asked)
        await stage.instance.fail(1, RequestRejected("out of vocabulary"))
        await until(lambda: stage.judge.cancelled == ["a/0"])
        await asyncio.sleep(0)
        assert list(stage.failed) == ["a"]
        assert not stage.judge.known
        assert not stage.judgements


async def test_restarted_group_is_judged_again() -> None:
    roles = {
        "batching": "fully_async",
        "freshness": {"max_staleness": 0, "when_stale": "drop"},
    }
    async with Stage(**roles) as stage:
        stage.submit()
        await stage.instance.answer(0, [7])
        await stage.instance.answer(1, [8])
        await stage.judge.answer("a/0", 1.0)
        await until(lambda: set(stage.judge.asked) == {"a/0", "a/1"} and stage.judge.known)
        stage.driver.fleet.loader = _load
        stage.driver.tell(WeightsPublished(1))
        await until(lambda: stage.judge.cancelled == ["a/1"])
        assert not stage.judge.known
        stage.judge.asked.clear()
        for number in (2, 3):
            await stage.instance.answer(number, [9])
        await stage.judge.answer("a/0", 3.0)
        await stage.judge.answer("a/1", 4.0)
        await until(lambda: len(stage.delivered) == 2)
        assert stage.judge.known == {"a/0": 3.0, "a/1": 4.0}
        assert len(stage.judgements) == 1
        assert not stage.driver.view.anomalies


async def _load(client: Any, version: int) -> None:
    """Loaded at once."""


async def test_a_driver_that_is_closed_cancels_all() -> None:
    async with Stage() as stage:
        stage.submit()
        for number in range(2):
            await stage.instance.answer(number, [7])
        await until(lambda: len(stage.judge.asked) == 2)
        assert stage.at_work == 3
    await until(lambda: sorted(stage.judge.cancelled) == ["a/0", "a/1"])
    assert not stage.at_work
    assert not stage.judgements
    assert not stage.failed


async def test_broken_scheduler_fails_open_judgements() -> None:
    async with Stage() as stage:
        stage.submit()
        for number in range(2):
            await stage.instance.answer(number, [7])
        await until(lambda: len(stage.judge.asked) == 2)
        why = RuntimeError("no more")
        stage.driver.pump.fail(why)
        stage.driver.tell(BatchRequested())  # what is told afterwards is told now
        assert stage.failed == {"a": why}
        await until(lambda: sorted(stage.judge.cancelled) == ["a/0", "a/1"])


async def test_group_without_a_judge_fails_with_the_reason() -> None:
    failed: dict[str, Exception | None] = {}

    instance = Scripted()
    driver = Driver(make_scheduler(), on_group_failed=failed.__setitem__)
    await driver.add_instance(instance)
    driver.tell(BatchRequested())
    submitted = GroupSubmitted("a", 1, 1, 9, judged=True)
    driver.submit_group(submitted, lambda index: TokenPayload([1], {}))
    await instance.answer(0, [7])
    await until(lambda: "a" in failed)
    assert driver.broken is None
    await driver.close()
    assert str(failed["a"]) == "no reward function is set"


def sample(index: int = 0, reward: float | None = None) -> Sample:
    return Sample(
        "a", index, [1], [2], [1], None, [0], [], 0, "stop", "COMPLETED", 0, reward=reward
    )


def group(*rewards: float) -> list[Sample]:
    return [sample(index, reward) for index, reward in enumerate(rewards)]


def settings(**given: Any) -> RewardSettings:
    return RewardSettings(**{"tries": 1, **given})


def run_reward_function(scene: Coroutine[Any, Any, Any]) -> Any:
    return virtual_loop.run(scene)


async def score(of: Sample) -> float:
    return 0.5


class Returns:
    """A reward function that returns, or raises, one after the other."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.called_at: list[float] = []

    async def __call__(self, of: Sample) -> Any:
        self.called_at.append(asyncio.get_running_loop().time())
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


class TestReturnedRewards:
    @pytest.mark.parametrize(
        ("returned", "reward"),
        [
            (1, Reward(1.0)),
            (True, Reward(1.0)),
            (np.float32(0.5), Reward(0.5)),
            (np.int64(3), Reward(3.0)),
            (Fraction(1, 4), Reward(0.25)),
            ({"format": 1, "answer": 0.5}, Reward(1.5, {"format": 1.0, "answer": 0.5})),
            ({"answer": 1, "total": 3}, Reward(3.0, {"answer": 1.0, "total": 3.0})),
        ],
    )
    def test_numbers_in_all_and_by_name(self, returned: Any, reward: Reward) -> None:
        function = RewardFunction(Returns(returned), settings=settings())
        assert run_reward_function(function.reward(sample())) == reward

    @pytest.mark.parametrize(
        "returned",
        [None, "1", b"1", math.nan, math.inf, -math.inf, {}, {"answer": math.nan}, [1.0], object()],
    )
    def test_anything_else_is_an_error_and_never_a_zero(self, returned: Any) -> None:
        """Nor is it asked again: it would say the same."""
        function = RewardFunction(Returns(returned), settings=settings(tries=3))
        with pytest.raises(RewardFailed, match=r"reward of sample 0 of group 'a' is .*return a"):
            run_reward_function(function.reward(sample()))

    def test_a_plain_function_is_called_in_a_thread(self) -> None:
        threads = []

        def plain(of: Sample) -> float:
            threads.append(threading.current_thread())
            return 2.0

        function = RewardFunction(plain, settings=settings())
        assert virtual_net.run(function.reward(sample())) == Reward(2.0)
        assert threads != [threading.main_thread()]


class TestTries:
    def test_it_is_tried_again_with_backoff(self) -> None:
        calls = Returns(ValueError("no"), OSError("no"), 1.0)
        function = RewardFunction(calls, settings=settings(tries=3, backoff_s=2.0))
        assert run_reward_function(function.reward(sample())) == Reward(1.0)
        first, second, third = calls.called_at
        assert (second - first, third - second) == pytest.approx((2.0, 4.0))

    def test_and_given_up(self) -> None:
        calls = Returns(ValueError("no"), OSError("down"))
        function = RewardFunction(calls, settings=settings(tries=2))
        said = "reward of sample 0 of group 'a' failed 2 times, last with OSError: down"
        with pytest.raises(RewardFailed, match=said):
            run_reward_function(function.reward(sample()))

    @pytest.mark.parametrize("stubborn", [False, True])
    def test_hanging_function_is_given_up(self, stubborn: bool) -> None:
        """Even if it does not end when it is cancelled."""

        async def never(of: Sample) -> float:
            while True:
                try:
                    await asyncio.sleep(1e6)
                except asyncio.CancelledError:
                    if not stubborn or released:
                        raise

        released = False

        async def scene() -> None:
            nonlocal released
            function = RewardFunction(never, settings=settings(timeout_s=5.0))
            began = asyncio.get_running_loop().time()
            with pytest.raises(RewardFailed, match="TimeoutError: no answer within 5 s"):
                await function.reward(sample())
            assert asyncio.get_running_loop().time() - began == pytest.approx(5.0)
            released = True  # for the loop to end

        run_reward_function(scene())

    def test_cancelled_call_cancels_the_reward_function(self) -> None:
        cancelled = []

        async def never(of: Sample) -> float:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                cancelled.append(of)
                raise
            return 0.0

        async def scene() -> None:
            call = asyncio.ensure_future(RewardFunction(never).reward(sample()))
            await asyncio.sleep(1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.sleep(0)
            assert len(cancelled) == 1

        run_reward_function(scene())


class TestBounds:
    def test_concurrency_is_bounded(self) -> None:
        at_once = most = 0

        async def slow(of: Sample) -> float:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(1)
            at_once -= 1
            return 0.0

        async def scene() -> float:
            function = RewardFunction(slow, settings=settings(concurrency=3))
            began = asyncio.get_running_loop().time()
            await asyncio.gather(*(function.reward(sample(index)) for index in range(7)))
            return asyncio.get_running_loop().time() - began

        assert run_reward_function(scene()) == pytest.approx(3.0)
        assert most == 3

    def test_waiting_retry_takes_no_concurrency(self) -> None:
        async def fails_once(of: Sample) -> float:
            if of.index not in tried:
                tried.add(of.index)
                raise OSError
            return 0.0

        tried: set[int] = set()

        async def scene() -> float:
            function = RewardFunction(
                fails_once, settings=settings(concurrency=1, tries=2, backoff_s=10.0)
            )
            began = asyncio.get_running_loop().time()
            await asyncio.gather(*(function.reward(sample(index)) for index in range(5)))
            return asyncio.get_running_loop().time() - began

        assert run_reward_function(scene()) == pytest.approx(10.0)

    async def test_rate_is_bounded(self) -> None:
        """By the throttle's own clock, which is no loop's."""
        calls = Returns(*[1.0] * 3)
        function = RewardFunction(calls, settings=settings(rate=2))

        await asyncio.gather(*(function.reward(sample(index)) for index in range(3)))
        first, second, third = calls.called_at
        assert third - first >= 0.9 > second - first


class TestKeep:
    @pytest.mark.parametrize(
        ("rewards", "kept"),
        [([0, 0, 0], False), ([1.0, 1.0], False), ([0, 1], True), ([0.5, 0.5, 0.25], True)],
    )
    def test_equal_rewards_teach_nothing(self, rewards: list[float], kept: bool) -> None:
        function = RewardFunction(score, nonzero_variance)
        assert function.filters
        assert run_reward_function(function.keeps(group(*rewards))) is kept

    def test_a_group_of_one_is_kept(self) -> None:
        assert run_reward_function(nonzero_variance(group(0.0)))

    def test_without_a_filter_all_are(self) -> None:
        function = RewardFunction(score)
        assert not function.filters
        assert run_reward_function(function.keeps(group(0, 0))) is True

    @pytest.mark.parametrize("way", ["plain", "coroutine"])
    def test_of_ones_own(self, way: str) -> None:
        def hard(samples: Sequence[Sample]) -> bool:
            return sum(sample.reward or 0 for sample in samples) < 2

        async def also_hard(samples: Sequence[Sample]) -> bool:
            return hard(samples)

        function = RewardFunction(score, hard if way == "plain" else also_hard)
        assert virtual_net.run(function.keeps(group(1, 0))) is True
        assert virtual_net.run(function.keeps(group(1, 1))) is False

    @pytest.mark.parametrize("answer", [ValueError("no"), None])
    def test_filter_error_fails_the_group(self, answer: Any) -> None:
        function = RewardFunction(score, Returns(answer))
        with pytest.raises(RewardFailed, match="whether to keep group 'a' is unknown"):
            run_reward_function(function.keeps(group(1, 0)))

    def test_hanging_function_is_given_up(self) -> None:
        async def never(samples: Sequence[Sample]) -> bool:
            await asyncio.sleep(1e6)
            return True

        function = RewardFunction(score, never, settings(timeout_s=5.0))
        with pytest.raises(RewardFailed, match="no answer within 5 s"):
            run_reward_function(function.keeps(group(1, 0)))


def policy(**rewards: Any) -> Any:
    return parse_policy("mine", {"rewards": rewards} if rewards else {})


HERE = "tests.live.trainer.test_rewards"


class TestPolicyFile:
    def test_no_settings_mean_no_reward_function(self) -> None:
        assert reward_function_of(policy()) is None

    def test_a_function_by_name(self) -> None:
        function = reward_function_of(policy(use=f"{HERE}:score", keep="nonzero_variance"))
        assert function.filters
        assert run_reward_function(function.reward(sample())) == Reward(0.5)

    def test_given_function_replaces_that_of_the_file_within_its_bounds(self) -> None:
        async def other(of: Sample) -> float:
            raise OSError("down")

        found = reward_function_of(policy(use=f"{HERE}:score", tries=1), other, keep="")
        assert not found.filters
        with pytest.raises(RewardFailed, match="failed 1 times"):
            run_reward_function(found.reward(sample()))

    @pytest.mark.parametrize(
        ("table", "error"),
        [
            ({"concurency": 3}, 'rewards.concurency: unknown key; did you mean "concurrency"'),
            ({"use": "nothing.here:at_all"}, "rewards.use: cannot import 'nothing.here:at_all'"),
            ({"use": f"{HERE}:HERE"}, "which is not a function"),
            ({"use": f"{HERE}:score", "keep": "nonzero"}, 'keep: unknown filter.*"nonzero_varia'),
            ({"keep": "nonzero_variance"}, "rewards.use: missing"),
            ({"timeout_s": 0}, "rewards.timeout_s = 0"),
        ],
    )
    def test_invalid_settings_are_named(self, table: dict[str, Any], error: str) -> None:
        with pytest.raises(ConfigError, match=f"mine: .*{error}"):
            reward_function_of(policy(**table))

    def test_a_table_is_expected(self) -> None:
        with pytest.raises(ConfigError, match="rewards: expected a table"):
            parse_policy("mine", {"rewards": 3})

    def test_settings_are_checked_by_themselves(self) -> None:
        assert reward_settings_of(policy(keep="nonzero_variance")).keep == "nonzero_variance"
