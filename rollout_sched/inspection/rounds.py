"""Finds the steps of a trainer that knows nothing of us, and sends requests as any client does.

It asks for all responses of a step, waits for them, and trains; then it asks again. So a round is
what is asked from a silence, in which no request is open, to the next. Such a trainer is
synchronous under every policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import msgspec

from rollout_sched.config import PolicyFile, parse_policy
from rollout_sched.core.model.events import (
    Event,
    RequestFailed,
    RequestFinished,
    RequestSubmitted,
    RequestWithdrawn,
    Restored,
    TrajectoryEnded,
)
from rollout_sched.metrics.fold import mean, quantile
from rollout_sched.simulators.replay.command import IN_ROUNDS

#: Clients come in rounds if all but one in five differ by at most a quarter from the median.
_LIKE, _SHARE = 0.25, 0.8

#: Roles that act on groups only, or on requests that are open when weights come.
_GROUPS = ("batching", "selection", "freshness", "interruption", "weights", "migration", "lending")


class RoundFigures(msgspec.Struct, frozen=True):
    """The rounds of a run.

    prompts, samples  usual number in a round, and of a prompt
    t50_s, t90_s      until so many % of a round's responses were there, on average
    length_s          until the last was there, on average
    silence_s         from there to the next round, on average
    """

    rounds: int
    prompts: int
    samples: int
    t50_s: float
    t90_s: float
    length_s: float
    silence_s: float


@dataclass(slots=True)
class Round:
    """`prompts`: requests by the group that the client named; `ended_s`: by request."""

    began_s: float
    prompts: Counter[str] = field(default_factory=Counter)
    ended_s: dict[str, float] = field(default_factory=dict)

    def times_s(self) -> list[float]:
        """From its beginning to the end of each request, ascending."""
        return sorted([at - self.began_s for at in self.ended_s.values()])


def find_rounds(events: Iterable[tuple[float, Event]]) -> list[Round]:
    """The rounds of the requests of clients: at least two that are alike, else none.

    `events`: with their times, in seconds.
    """
    found: list[Round] = []
    opened: set[str] = set()
    for now, event in events:
        match event:
            case RequestSubmitted(request=request, ends=False):
                if not opened:
                    found.append(Round(now))
                opened.add(request)
                found[-1].prompts[event.group or request] += 1
            case RequestFailed() | RequestFinished() | RequestWithdrawn() | TrajectoryEnded():
                if event.request in opened or (found and event.request in found[-1].ended_s):
                    opened.discard(event.request)
                    found[-1].ended_s[event.request] = now
            case Restored():
                opened.clear()  # clients ask again
    return found if _alike([one.prompts.total() for one in found]) else []


def _alike(sizes: list[int]) -> bool:
    """Whether these are the sizes of rounds; the last may have been cut."""
    usual = median(sizes) if sizes else 0
    like = [abs(size - usual) <= _LIKE * usual for size in sizes[:-1]]
    return usual > 1 and len(like) > 0 and sum(like) >= _SHARE * len(like)


def round_figures(rounds: list[Round]) -> RoundFigures | None:
    """None if there are none."""
    if not rounds:
        return None
    times = [one.times_s() for one in rounds if one.ended_s]
    return RoundFigures(
        len(rounds),
        round(median([len(one.prompts) for one in rounds])),
        Counter(size for one in rounds for size in one.prompts.values()).most_common(1)[0][0],
        mean([quantile(one, 0.5) for one in times]),
        mean([quantile(one, 0.9) for one in times]),
        mean([one[-1] for one in times]),
        mean([after.began_s - max(one.ended_s.values()) for one, after in pairwise(rounds)]),
    )


def in_rounds(policy: PolicyFile) -> PolicyFile:
    """What the policy does for a trainer that sends requests in rounds: some of its roles have
    nothing to arrange, so that the trainer gets each step as from synchronous training."""
    tables = {role: table for role, table in policy.tables.items() if role not in _GROUPS}
    if tables.get("routing", {}).get("use") == "static_split":  # which divides groups, too
        del tables["routing"]
    return parse_policy(policy.name + IN_ROUNDS, tables)
