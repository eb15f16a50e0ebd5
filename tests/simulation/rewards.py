"""What samples are worth in a run: their prompts say it, and when nobody can judge them.

So the functions need to know nothing else but the response, whatever process calls them, and the
ledger knows what they must have answered.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterable
from random import Random
from typing import Any

import msgspec

from rollout_sched.live.samples import Sample
from tests.simulation import threads

#: Of the policy file's table, beside what is drawn.
TIMEOUT_S = 4.0

#: Samples of a group that are begun, over-sampling included, for each that it is to have: at most.
MOST = 4

#: A number, numbers by name, or what is none and fails its group.
Worth = float | dict[str, float] | None


class Rewards(msgspec.Struct, frozen=True):
    """Of one run.

    keep         the filter's name; "": all groups are trained
    in_thread    the function is a plain one, which is called in a thread
    seconds      that one takes, at most
    equal        share of the groups whose samples are worth the same
    broken       share of those of whose samples nobody can say what they are worth
    concurrency  rewards at once
    """

    keep: str
    in_thread: bool
    seconds: float
    equal: float
    broken: float
    concurrency: int

    @property
    def table(self) -> dict[str, Any]:
        """As a policy file has it."""
        function = score_in_thread if self.in_thread else score
        return {
            "use": f"{__name__}:{function.__name__}",
            "keep": self.keep,
            "timeout_s": TIMEOUT_S,
            "backoff_s": 0.5,
            "concurrency": self.concurrency,
        }


def draw(dice: Random) -> Rewards:
    return Rewards(
        keep=dice.choice(["", "nonzero_variance", "nonzero_variance"]),
        in_thread=dice.random() < 0.3,
        seconds=dice.choice([0.0, 0.2, 2.0]),
        equal=dice.choice([0.0, 0.3, 0.6]),
        broken=dice.choice([0.0, 0.0, 0.2]),
        concurrency=dice.choice([1, 4, 64]),
    )


def said_by_prompt(
    rewards: Rewards, samples: int, dice: Random, away: Iterable[tuple[float, float]]
) -> dict[str, Any]:
    """What the `extra` of a prompt says; `away`: from when to when the grader is."""
    made = MOST * samples
    if dice.random() < rewards.broken:
        worth: list[Worth] = [None] * made
    elif dice.random() < rewards.equal:
        worth = [1.0] * made
    else:
        worth = [dice.choice([number, {"answer": number, "form": 0}]) for number in range(made)]
    return {
        "worth": worth,
        "seconds": [round(dice.uniform(0, rewards.seconds), 3) for _ in range(made)],
        "away": [list(span) for span in away],
    }


def total(extra: dict[str, Any], index: int) -> float | None:
    """What a sample is worth in all; None if nobody can say."""
    worth: Worth = extra["worth"][index]
    return sum(worth.values()) if isinstance(worth, dict) else worth


def worth(sample: Sample) -> Worth:
    """What is said of it; where that comes in parts, they tell which response was read."""
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
    assert thread is not None
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
