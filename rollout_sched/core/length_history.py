"""The history of response lengths by prompt: the lengths of a prompt's earlier groups.

A prompt comes again in every epoch, and its responses are about as long as before (RhymeRL, arXiv
2508.18588, schedules by that). The history starts with what the trainer knew of a prompt when it
first came, and every delivery adds to it. Nothing else does, so the journal can restore it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

#: Lengths remembered per prompt: enough for several groups of the usual sizes, and no more memory
#: than a prompt's name and tokens take elsewhere.
MOST_LENGTHS = 32


class PromptLengths:
    """Response lengths of one prompt, shared by all current groups of the prompt.

    `ascending`: the lengths of the newest deliveries, as many whole deliveries as fit. A single
    delivery that is too large is thinned evenly by rank, because its order is that of finishing.
    """

    __slots__ = ("_deliveries", "ascending")

    def __init__(self, lengths: Sequence[int] = ()) -> None:
        self._deliveries: list[list[int]] = []
        self.ascending: list[int] = []
        if lengths:
            self.note(lengths)

    @property
    def deliveries(self) -> tuple[tuple[int, ...], ...]:
        """The remembered deliveries, oldest first; noting them in this order gives the same."""
        return tuple([tuple(delivery) for delivery in self._deliveries])

    def note(self, lengths: Sequence[int]) -> None:
        """A group was delivered with these response lengths, in any order."""
        deliveries = self._deliveries
        deliveries.append(_thinned(sorted(lengths)))
        while sum([len(delivery) for delivery in deliveries]) > MOST_LENGTHS:
            del deliveries[0]
        self.ascending = sorted([length for delivery in deliveries for length in delivery])

    def quantile(self, share: float) -> int | None:
        """The least length that this share (0 to 1) of them does not exceed; None if empty."""
        lengths = self.ascending
        if not lengths:
            return None
        return lengths[max(0, ceil(share * len(lengths) - 1e-9) - 1)]

    def __repr__(self) -> str:
        return f"<PromptLengths {self.ascending}>"


class LengthHistory:
    """`PromptLengths` by the name of the prompt."""

    def __init__(self) -> None:
        self._prompts: dict[str, PromptLengths] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, prompt: str) -> bool:
        return prompt in self._prompts

    def __iter__(self) -> Iterator[str]:
        return iter(self._prompts)

    def lengths(self) -> dict[str, list[int]]:
        """All lengths by prompt, ascending."""
        return {prompt: known.ascending for prompt, known in self._prompts.items()}

    def of(self, prompt: str, before: Sequence[int] = ()) -> PromptLengths:
        """A prompt's lengths; `before` is what was known of them when it first comes.

        A prompt without a name ("") cannot be recognised later, so its lengths are not kept.
        """
        if not prompt:
            return PromptLengths(before)
        known = self._prompts.get(prompt)
        if known is None:
            known = self._prompts[prompt] = PromptLengths(before)
        return known


def _thinned(ascending: list[int]) -> list[int]:
    """At most `MOST_LENGTHS` of the lengths, evenly by rank."""
    here, most = len(ascending), MOST_LENGTHS
    if here <= most:
        return ascending
    return [ascending[(2 * rank + 1) * here // (2 * most)] for rank in range(most)]
