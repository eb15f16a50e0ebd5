"""Judges finished samples and complete groups: the reward of each, and whether a group is kept.

A sample is judged as soon as it has finished, a group when the scheduler asks and all its samples
are judged. Neither holds a slot on an instance.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Annotated, Any, Final, get_args

import msgspec
from asyncio_throttle.throttler import Throttler

from rollout_sched.config import REWARDS, ConfigError, PolicyFile, imported, nearest, read_table
from rollout_sched.core.model.actions import Deliver, Discard, Dispatch, Judge
from rollout_sched.core.model.errors import RolloutError
from rollout_sched.core.model.events import (
    GroupJudged,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    Restored,
    ToolReturned,
    TrajectoryEnded,
    TurnFinished,
)
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.live.event_pump import EventPump
from rollout_sched.live.ports import SampleJudge
from rollout_sched.live.requests.payloads import PayloadBook
from rollout_sched.live.trainer.samples import Reward, Sample

log = logging.getLogger(__name__)

#: Events with which a request may finish.
Ending = (
    RequestFinished
    | TurnFinished
    | ToolReturned
    | TrajectoryEnded
    | RequestInterrupted
    | RequestFailed
)

ENDINGS: Final = get_args(Ending)


class Judging:
    """Runs one coroutine for each sample that is judged, and one for each group.

    A sample's reward is kept until the sample is delivered. If its request continues or is
    discarded, its judgement is cancelled and forgotten.
    """

    def __init__(self, pump: EventPump, payloads: PayloadBook, judge: SampleJudge) -> None:
        self._judge = judge
        self._pump = pump
        self._payloads = payloads
        self._view = pump.scheduler.view
        self._samples: dict[str, asyncio.Task[None]] = {}  # by request
        self._groups: dict[str, asyncio.Task[None]] = {}
        pump.before(Dispatch, self._go_on)
        pump.before(Deliver, self._deliver)
        pump.before(Discard, self._discard)
        pump.watch(self._look, *ENDINGS)
        pump.watch(self._look_at_all, Restored)

    def __len__(self) -> int:
        """Number of running coroutines."""
        calls = [*self._samples.values(), *self._groups.values()]
        return sum(not call.done() for call in calls)

    # -- what happens ----------------------------------------------------------------------

    def _look(self, event: Ending) -> None:
        """Judge the sample if the event has finished its request."""
        sample = self._view.to_judge(event.request)
        if sample is not None:
            self._begin(sample)

    def _look_at_all(self, event: Restored) -> None:
        """Judge samples that finished in an earlier epoch of the run and were not judged there."""
        for group in event.state.groups:
            waits = group.judged and group.state != "complete"
            for request in group.requests if waits else ():
                sample = self._view.to_judge(f"{group.group}/{request.index}")
                if sample is not None:
                    self._begin(sample)

    def _go_on(self, action: Dispatch) -> None:
        """The request continues: its reward is no longer valid."""
        self._forget(action.request)

    def _discard(self, action: Discard) -> None:
        if not action.attempt:
            self._forget(action.request)
            group = self._groups.pop(action.group, None)
            if group is not None:
                group.cancel()

    def _deliver(self, action: Deliver) -> None:
        for sample in action.samples:
            self._samples.pop(sample.request, None)

    def settle(self, action: Judge) -> None:
        """Decide whether a group is trained, once all its samples are judged."""
        calls = [self._begin(sample) for sample in action.samples]
        self._groups[action.group] = _task(self._settle(action, calls))

    def cancel_all(self) -> None:
        """Cancel all without reporting it."""
        for call in [*self._groups.values(), *self._samples.values()]:
            call.cancel()
        self._groups.clear()
        self._samples.clear()

    # -- samples and groups ----------------------------------------------------------------

    def _begin(self, sample: DeliveredSample) -> asyncio.Task[None]:
        call = self._samples.get(sample.request)
        if call is None:
            call = self._samples[sample.request] = _task(self._judge_one(sample))
        return call

    async def _judge_one(self, sample: DeliveredSample) -> None:
        worth = await self._judge.judge(sample, self._payloads.of)
        if self._samples.get(sample.request) is asyncio.current_task():
            self._judge.note(sample, worth)  # else this task ran on after it was cancelled

    def _forget(self, request: str) -> None:
        call = self._samples.pop(request, None)
        if call is not None:
            call.cancel()
        self._judge.forget(request)  # it may know the request from an earlier epoch of the run

    async def _settle(self, action: Judge, calls: Sequence[asyncio.Task[None]]) -> None:
        try:
            await asyncio.gather(*calls)
            kept = await self._judge.keeps(action.samples, self._payloads.of)
        except Exception as error:  # the caller's own
            log.exception("group %s could not be judged", action.group)
            self._payloads.note_group_error(action.group, error)
            event = GroupJudged(action.group, action.judgement, "failed")
        else:
            event = GroupJudged(action.group, action.judgement, "kept" if kept else "filtered")
        if self._groups.get(action.group) is not asyncio.current_task():
            return  # this task ran on after it was cancelled
        del self._groups[action.group]
        if self._view.is_judged(action.group, action.judgement):
            self._pump.tell(event)


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    call = asyncio.get_running_loop().create_task(work)
    call.add_done_callback(_heard)
    return call


def _heard(call: asyncio.Task[None]) -> None:
    """Mark the error as retrieved: it is raised where the task is awaited, if it is at all."""
    if not call.cancelled():
        call.exception()


# ------------------------------------------------------------------------------------------
# Computes rewards with the caller's function: with limits, retries and checks.
#
# A reward is a finite number, or finite numbers by name. Anything else is an error, never a zero.

#: Computes a sample's reward: a coroutine function, or a plain one, which is called in a thread. It
#: returns a number, or numbers by name. A plain one cannot be cancelled: it must end by itself.
RewardFunc = Callable[[Sample], Any]

#: Decides from a group's samples, with their rewards, whether to train it; called the same way.
KeepFunc = Callable[[Sequence[Sample]], Any]

#: The named reward that is the total; without it the total is the sum.
TOTAL = "total"

Positive = Annotated[float, msgspec.Meta(gt=0)]


class RewardFailed(RolloutError, RuntimeError):
    """The reward of a sample, or whether to keep its group, could not be computed."""


class RewardSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The [rewards] table of a policy file.

    use          the reward function, "package.module:function"
    keep         which groups are trained, decided when all their rewards are known:
                 "nonzero_variance", or "package.module:function"; "": all
    concurrency  most rewards that are computed at once
    rate         most rewards that start per second; 0: no limit
    timeout_s    seconds for one try
    tries        tries before the reward counts as failed
    backoff_s    seconds between the first two tries, doubled for each further try
    """

    use: str = ""
    keep: str = ""
    concurrency: Annotated[int, msgspec.Meta(ge=1)] = 64
    rate: Annotated[int, msgspec.Meta(ge=0)] = 0
    timeout_s: Positive = 300.0
    tries: Annotated[int, msgspec.Meta(ge=1)] = 3
    backoff_s: Positive = 1.0


async def nonzero_variance(samples: Sequence[Sample]) -> bool:
    """Whether the rewards differ: with equal rewards every advantage is 0, and nothing is learnt.

    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). As in verl's recipe of it, a group of
    one sample is kept.
    """
    rewards = [sample.reward for sample in samples]
    return len(rewards) == 1 or len(set(rewards)) > 1


KEEPS: dict[str, KeepFunc] = {"nonzero_variance": nonzero_variance}


class RewardFunction:
    """A reward function with its limits, and the filter that uses its rewards."""

    def __init__(
        self,
        function: RewardFunc,
        keep: KeepFunc | None = None,
        settings: RewardSettings | None = None,
    ) -> None:
        settings = settings or RewardSettings()
        self._function = function
        self._keep = keep
        self._settings = settings
        self._free = asyncio.Semaphore(settings.concurrency)
        self._throttle = Throttler(rate_limit=settings.rate) if settings.rate else None

    @property
    def filters(self) -> bool:
        """Whether there is a filter that may drop groups."""
        return self._keep is not None

    async def reward(self, sample: Sample) -> Reward:
        """Compute a sample's reward. Raises RewardFailed after the last try."""
        whose = f"the reward of sample {sample.index} of group {sample.uid!r}"
        tries, wait_s = self._settings.tries, self._settings.backoff_s
        for left in reversed(range(tries)):
            try:
                returned = await self._bounded(sample)
                break
            except Exception as error:  # the caller's own
                if not left:
                    raise RewardFailed(
                        f"{whose} failed {tries} times, last with {_told(error)}"
                    ) from error
            await asyncio.sleep(wait_s)
            wait_s *= 2
        try:
            return _checked(returned)
        except (TypeError, ValueError) as error:
            raise RewardFailed(f"{whose} is {error}") from error

    async def keeps(self, samples: Sequence[Sample]) -> bool:
        """Whether a group is trained. Raises RewardFailed if the filter fails."""
        if self._keep is None:
            return True
        whose = f"whether to keep group {samples[0].uid!r}"
        try:
            kept = await self._within_time(_called(self._keep, samples))
        except Exception as error:  # the caller's own
            raise RewardFailed(f"{whose} is unknown: {_told(error)}") from error
        if kept is None:
            raise RewardFailed(f"{whose} is unknown: got None; return True or False")
        return bool(kept)

    async def _bounded(self, sample: Sample) -> Any:
        async with self._free:
            if self._throttle is not None:
                await self._throttle.acquire()  # type: ignore[no-untyped-call]
            return await self._within_time(_called(self._function, sample))

    async def _within_time(self, work: Awaitable[Any]) -> Any:
        """Stop waiting after the timeout, even if the work ignores its cancellation."""
        call = asyncio.ensure_future(work)
        timeout_s = self._settings.timeout_s
        try:
            done, _ = await asyncio.wait({call}, timeout=timeout_s)
        finally:
            call.cancel()
        if not done:
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        return call.result()


def reward_settings_of(policy: PolicyFile) -> RewardSettings:
    """The settings in the policy's [rewards] table. Raises ConfigError naming the key."""
    return read_table(policy.name, REWARDS, policy.rewards, RewardSettings)


def reward_function_of(
    policy: PolicyFile, reward: RewardFunc | None = None, keep: KeepFunc | str | None = None
) -> RewardFunction | None:
    """The reward function of the policy's [rewards] table; `reward` and `keep` take precedence.
    None if there is no reward. Call it inside a running event loop. Raises ConfigError."""
    path = f"{policy.name}: {REWARDS}"
    settings = reward_settings_of(policy)
    if reward is None and settings.use:
        reward = imported(f"{path}.use", settings.use)
    chosen = _keep(f"{path}.keep", settings.keep if keep is None else keep)
    if reward is not None:
        return RewardFunction(reward, chosen, settings)
    if chosen is not None or policy.rewards:
        raise ConfigError(
            f"{path}.use: missing, so there are no rewards; set a function, as in "
            f'use = "my_rewards:score", or pass reward=... in Python'
        )
    return None


def _keep(path: str, use: KeepFunc | str) -> KeepFunc | None:
    if not isinstance(use, str):
        return use
    if not use:
        return None
    if use in KEEPS:
        return KEEPS[use]
    if ":" not in use:
        raise ConfigError(
            f"{path}: unknown filter {use!r}{nearest(use, KEEPS)} (allowed: {', '.join(KEEPS)}, or "
            "package.module:function)"
        )
    found: KeepFunc = imported(path, use)
    return found


async def _called(function: Callable[[Any], Any], argument: Any) -> Any:
    own = type(function).__call__  # of a callable object
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(own):
        return await function(argument)
    returned = await asyncio.to_thread(function, argument)
    return await returned if inspect.isawaitable(returned) else returned


def _checked(returned: Any) -> Reward:
    """The reward. Raises TypeError or ValueError with what was returned instead."""
    if not isinstance(returned, Mapping):
        return Reward(_number(returned))
    named = {str(name): _number(value) for name, value in returned.items()}
    if not named:
        raise ValueError("an empty mapping; return a number, or numbers by name")
    return Reward(named.get(TOTAL, math.fsum(named.values())), named)


def _number(value: Any) -> float:
    """Any number as a float, including bools and numpy or torch scalars."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{value!r:.80}; return a finite number, or finite numbers by name")
    return number


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
