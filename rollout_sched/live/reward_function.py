"""What samples are worth, by a function of the caller's: bounded, tried again, and checked.

A reward is a finite number, or finite numbers by name. What it is not is an error, never a zero.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from asyncio_throttle.throttler import Throttler

from rollout_sched.config import REWARDS, ConfigError, PolicyFile, imported, nearest, read_table
from rollout_sched.core.errors import RolloutError
from rollout_sched.live.samples import Reward, Sample

#: What a sample is worth: a coroutine function, or a plain one, which is called in a thread. It
#: returns a number, or numbers by name. A plain one cannot be broken off: it should end by itself.
RewardFunc = Callable[[Sample], Any]

#: Whether a group is to be trained, by its samples, which have their rewards: likewise.
KeepFunc = Callable[[Sequence[Sample]], Any]

#: What of named rewards is their total; where it is not there, that is their sum.
TOTAL = "total"

Positive = Annotated[float, msgspec.Meta(gt=0)]


class RewardFailed(RolloutError, RuntimeError):
    """Nobody can tell what a sample, or its group, is worth."""


class RewardSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The [rewards] table of a policy file.

    use          the reward function, "package.module:function"
    keep         which groups are trained, once all rewards of one are there: "nonzero_variance", or
                 "package.module:function"; "": all
    concurrency  rewards that are computed at once, at most
    rate         that begin in a second, at most; 0: no bound
    timeout_s    seconds for one try
    tries        until it is given up
    backoff_s    seconds between the first two tries, doubled for each one more
    """

    use: str = ""
    keep: str = ""
    concurrency: Annotated[int, msgspec.Meta(ge=1)] = 64
    rate: Annotated[int, msgspec.Meta(ge=0)] = 0
    timeout_s: Positive = 300.0
    tries: Annotated[int, msgspec.Meta(ge=1)] = 3
    backoff_s: Positive = 1.0


async def nonzero_variance(samples: Sequence[Sample]) -> bool:
    """Whether the rewards differ: equal ones teach nothing, for every advantage is 0.

    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). As in verl's recipe of it, a group of
    one sample, which has nothing to differ from, is kept.
    """
    rewards = [sample.reward for sample in samples]
    return len(rewards) == 1 or len(set(rewards)) > 1


KEEPS: dict[str, KeepFunc] = {"nonzero_variance": nonzero_variance}


class RewardFunction:
    """A reward function within its bounds, and what filters by its rewards."""

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
        """Whether any group might not be kept."""
        return self._keep is not None

    async def reward(self, sample: Sample) -> Reward:
        """Raises RewardFailed once it has been tried often enough."""
        whose = f"the reward of sample {sample.index} of group {sample.uid!r}"
        tries, wait_s = self._settings.tries, self._settings.backoff_s
        for left in reversed(range(tries)):
            try:
                returned = await self._bounded(sample)
                break
            except Exception as error:  # the caller's own
                if not left:
                    raise RewardFailed(
                        f"{whose} failed {tries} times, at last with {_told(error)}"
                    ) from error
            await asyncio.sleep(wait_s)
            wait_s *= 2
        try:
            return _checked(returned)
        except (TypeError, ValueError) as error:
            raise RewardFailed(f"{whose} is {error}") from error

    async def keeps(self, samples: Sequence[Sample]) -> bool:
        """Whether a group is to be trained. Raises RewardFailed if nobody can tell."""
        if self._keep is None:
            return True
        whose = f"whether to keep group {samples[0].uid!r}"
        try:
            kept = await self._within_time(_called(self._keep, samples))
        except Exception as error:  # the caller's own
            raise RewardFailed(f"{whose} could not be told: {_told(error)}") from error
        if kept is None:
            raise RewardFailed(f"{whose} was answered by None; return True or False")
        return bool(kept)

    async def _bounded(self, sample: Sample) -> Any:
        async with self._free:
            if self._throttle is not None:
                await self._throttle.acquire()  # type: ignore[no-untyped-call]
            return await self._within_time(_called(self._function, sample))

    async def _within_time(self, work: Awaitable[Any]) -> Any:
        """What does not end even when it is cancelled is waited for no longer."""
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
    """What the policy's [rewards] table says. Raises ConfigError naming the key."""
    return read_table(policy.name, REWARDS, policy.rewards, RewardSettings)


def reward_function_of(
    policy: PolicyFile, reward: RewardFunc | None = None, keep: KeepFunc | str | None = None
) -> RewardFunction | None:
    """As the policy's [rewards] table says, but for what is given; None if there is no reward. Make
    it inside a running event loop. Raises ConfigError."""
    path = f"{policy.name}: {REWARDS}"
    settings = reward_settings_of(policy)
    if reward is None and settings.use:
        reward = imported(f"{path}.use", settings.use)
    chosen = _keep(f"{path}.keep", settings.keep if keep is None else keep)
    if reward is not None:
        return RewardFunction(reward, chosen, settings)
    if chosen is not None or policy.rewards:
        raise ConfigError(
            f"{path}.use: missing, so that there are no rewards; name a function, as in "
            f'use = "my_rewards:score", or give reward=... in Python'
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
    own = type(function).__call__  # of an object that can be called
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(own):
        return await function(argument)
    returned = await asyncio.to_thread(function, argument)
    return await returned if inspect.isawaitable(returned) else returned


def _checked(returned: Any) -> Reward:
    """Raises TypeError or ValueError, with what it is instead."""
    if not isinstance(returned, Mapping):
        return Reward(_number(returned))
    named = {str(name): _number(value) for name, value in returned.items()}
    if not named:
        raise ValueError("an empty mapping; return a number, or numbers by name")
    return Reward(named.get(TOTAL, math.fsum(named.values())), named)


def _number(value: Any) -> float:
    """Of whatever is one: a bool, numpy's and torch's scalars too."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{value!r:.80}; return a finite number, or finite numbers by name")
    return number


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
