"""Selection: which fresh groups start together."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Annotated, Literal

import msgspec

from rollout_sched.core.roles import Group
from rollout_sched.policies.prediction import length_before

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class InOrder(msgspec.Struct, frozen=True):
    """In the order they came."""

    window = 0

    def choose(
        self, window: Sequence[Group], wanted: int, beside: Sequence[Group]
    ) -> Sequence[Group]:
        return window[:wanted]


class LikeLengths(msgspec.Struct, frozen=True):
    """Rounds of prompts of like expected length, so that no round waits for a few long ones.

    A round lasts as long as its longest response, so what is expected of a prompt is a high
    `quantile` of its earlier responses (the tiers of RhymeRL, arXiv 2508.18588; SortedRL, arXiv
    2603.23414, starts the short ones first). A prompt without history is as long as the trainer
    expects, else as its limit allows: those that nothing is known of go together, long prompts with
    long ones.

    But who trains by length teaches by length. `max_step_bias` bounds that: the Kolmogorov-Smirnov
    distance between the expected lengths of a round and those of its window is at most that, and
    one group's share more, where rounds are of one size. That share of a round is of like length;
    the others are dealt from the window evenly. The dealt are the shortest of the window, the last
    to decide a round's time, and the longest are cut into runs, one for each round. If what is
    expected to be longer is longer by chance, the bound holds in expectation for the lengths
    themselves. 1 is no bound, 0 makes all rounds alike. It is about what starts: what is set back
    for another round moves both rounds by its share.

    `window`: among the prompts of so many rounds, all of which start before the next ones. `order`:
    the rounds within a window. What was set back starts over beside the longest ones.
    """

    window: Annotated[int, msgspec.Meta(ge=1)] = 8
    quantile: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.75
    max_step_bias: Share = 0.5
    order: Literal["shortest_first", "longest_first"] = "shortest_first"

    uses_history = True
    tunable = ("quantile",)

    def choose(
        self, window: Sequence[Group], wanted: int, beside: Sequence[Group]
    ) -> Sequence[Group]:
        ranked = sorted(window, key=self._key)
        share = floor(self.max_step_bias * (wanted + len(beside)) + 1e-9)
        alike = min(wanted, max(0, share - len(beside)))
        dealt = wanted - alike
        short = round(len(ranked) * dealt / wanted)
        longest = len(ranked) if beside or self.order == "longest_first" else short + alike
        return [*_deal(ranked[:short], dealt), *ranked[longest - alike : longest]]

    def _key(self, group: Group) -> tuple[int, int]:
        return self.expected(group), group.siblings.prompt_tokens

    def expected(self, group: Group) -> int:
        """Response tokens of its longest samples."""
        return length_before(group.siblings, self.quantile)


def _deal(ranked: Sequence[Group], wanted: int) -> list[Group]:
    """One out of each of so many runs of equal length, the one that came first."""
    edges = [number * len(ranked) // wanted for number in range(wanted)] if wanted else []
    runs = zip(edges, [*edges[1:], len(ranked)], strict=False)
    return [min(ranked[start:end], key=lambda group: group.serial) for start, end in runs]
