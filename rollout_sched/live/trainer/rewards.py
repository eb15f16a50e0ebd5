"""Judges finished samples and complete groups: the reward of each, and whether a group is kept.

A sample is judged as soon as it has finished, a group when the scheduler asks and all its samples
are judged. Neither holds a slot on an instance.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from asyncio_throttle.throttler import Throttler

from rollout_sched.config import REWARDS, ConfigError, PolicyFile, imported, nearest, read_table
from rollout_sched.core.errors import RolloutError
from rollout_sched.core.model.records import MAX_SIZE, Count
from rollout_sched.live.trainer.samples import Reward, Sample

log = logging.getLogger(__name__)


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
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)] = 64
    rate: Count = 0
    timeout_s: Positive = 300.0
    tries: Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)] = 3
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
