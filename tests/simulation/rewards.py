"""The rewards of the samples in a run: their prompts contain them, and when the grader is away.

So the functions need only the sample, in whatever process they run, and the ledger knows the
correct results.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterable
from random import Random
from typing import Any

import msgspec

from rollout_sched.live.trainer.samples import Sample
from tests.simulation import threads

#: Timeout in the policy file's table, not drawn from the seed.
TIMEOUT_S = 4.0

#: Most samples that are started for each sample of a group, including over-sampling.
MOST = 4

#: A number, numbers by name, or None, which is invalid and fails the group.
Worth = float | dict[str, float] | None


class Rewards(msgspec.Struct, frozen=True):
    """The rewards of one run.

    keep         the filter's name; "": all groups are trained
    in_thread    the function is a plain one, called in a thread
    seconds      longest duration of a reward
    equal        share of the groups whose samples have equal rewards
    broken       share of the groups whose rewards always fail
    concurrency  rewards computed at once
    """

    keep: str
    in_thread: bool
    seconds: float
    equal: float
    broken: float
    concurrency: int

    @property
    def table(self) -> dict[str, Any]:
        """The table for a policy file."""
        function = score_in_thread if self.in_thread else score
        return {
            "use": f"{__name__}:{function.__name__}",
            "keep": self.keep,
            "timeout_s": TIMEOUT_S,
            "backoff_s": 0.5,
            "concurrency": self.concurrency,
        }


def draw(rng: Random) -> Rewards:
    return Rewards(
        keep=rng.choice(["", "nonzero_variance", "nonzero_variance"]),
        in_thread=rng.random() < 0.3,
        seconds=rng.choice([0.0, 0.2, 2.0]),
        equal=rng.choice([0.0, 0.3, 0.6]),
        broken=rng.choice([0.0, 0.0, 0.2]),
        concurrency=rng.choice([1, 4, 64]),
    )


def said_by_prompt(
    rewards: Rewards, samples: int, rng: Random, away: Iterable[tuple[float, float]]
) -> dict[str, Any]:
    """The `extra` of a prompt; `away`: the times at which the grader is away."""
    made = MOST * samples
    if rng.random() < rewards.broken:
        worth: list[Worth] = [None] * made
    elif rng.random() < rewards.equal:
        worth = [1.0] * made
    else:
        worth = [rng.choice([number, {"answer": number, "form": 0}]) for number in range(made)]
    return {
        "worth": worth,
        "seconds": [round(rng.uniform(0, rewards.seconds), 3) for _ in range(made)],
        "away": [list(span) for span in away],
    }


def total(extra: dict[str, Any], index: int) -> float | None:
    """The total reward of a sample; None if it always fails."""
    worth: Worth = extra["worth"][index]
    return sum(worth.values()) if isinstance(worth, dict) else worth


def worth(sample: Sample) -> Worth:
    """The reward of a sample; if it has parts, they identify the response."""
    said: Worth = sample.extra["worth"][sample.index]
    if not isinstance(said, dict):
        return said
    read = zlib.crc32(repr(sample.response_ids).encode())
    return {"answer": said["answer"] - read, "form": said["form"] + read}


async def score(sample: Sample) -> Worth:
    await asyncio.sleep(_seconds(sample))
    return _worth(sample)


def score_in_thread(sample: Sample) -> Worth:
    thread = threads.current()
    thread.sleep(_seconds(sample))
    return _worth(sample)


def _seconds(sample: Sample) -> float:
    seconds: float = sample.extra["seconds"][sample.index]
    return seconds


def _worth(sample: Sample) -> Worth:
    """Raises RuntimeError while the grader is away."""
    now = time.monotonic()
    if any(begins <= now < ends for begins, ends in sample.extra["away"]):
        raise RuntimeError("the grader is away")
    return worth(sample)
