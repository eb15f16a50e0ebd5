"""Selection: which fresh groups start together."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Annotated, Literal

import msgspec

from rollout_sched.core.model.roles import Group, Selection
from rollout_sched.policies.prediction import length_before

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class InOrder(Selection, msgspec.Struct, frozen=True):
    """In order of arrival."""

    window = 0

    def choose(
        self, window: Sequence[Group], wanted: int, beside: Sequence[Group]
    ) -> Sequence[Group]:
        return window[:wanted]


class LikeLengths(Selection, msgspec.Struct, frozen=True):
    """Rounds of prompts of similar expected length, so that no round waits for a few long ones.

    A round lasts as long as its longest response, so the expected length of a prompt is a high
    `quantile` of its earlier responses (the tiers of RhymeRL, arXiv 2508.18588; SortedRL, arXiv
    2603.23414, starts the short ones first). A prompt without history has the length that the
    trainer expects, or else its limit: prompts of unknown length go together, long prompts with
    long ones.

    But training in order of length biases the training by length. `max_step_bias` bounds this: the
    Kolmogorov-Smirnov distance between the expected lengths of a round and those of its window is
    at most this value plus one group's share, if rounds are of one size. That share of a round is
    of similar length; the others are dealt evenly from the window. The dealt groups are the
    shortest of the window, which are the least likely to decide a round's time, and the longest are
    cut into runs, one per round. If groups with longer expected lengths are longer in distribution,
    the bound holds in expectation for the lengths themselves. 1 is no bound, 0 makes all rounds
    alike. The bound is on what starts: a group that is set back moves both rounds by its share.

    `window`: number of rounds whose prompts are chosen from; all start before the next ones.
    `order`: of the rounds within a window. Groups that were set back start over beside the longest.
    """

    window: Annotated[int, msgspec.Meta(ge=1)] = 8
    quantile: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.75
    max_step_bias: Share = 0.5
    order: Literal["shortest_first", "longest_first"] = "shortest_first"

    uses_history = True

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
        """Expected response tokens of the longest samples of a group."""
        return length_before(group.siblings, self.quantile)


def _deal(ranked: Sequence[Group], wanted: int) -> list[Group]:
    """One group from each of `wanted` runs of equal length: the one that came first."""
    edges = [number * len(ranked) // wanted for number in range(wanted)] if wanted else []
    runs = zip(edges, [*edges[1:], len(ranked)], strict=False)
    return [min(ranked[start:end], key=lambda group: group.serial) for start, end in runs]
