"""What a page draws of one run: every attempt, in columns, and the fleet over time."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.generic]

#: A request that has no group stands under its own name, with this index.
ALONE = 2**32 - 1

#: Shares of a distribution at which its quantiles are told.
QUANTILES = 201


class RunRecord(msgspec.Struct):
    """Times in seconds of the run, which ends at `end_s`; a column has a value for each row.

    instances  names
    groups     names; of a request without a group its own
    requests   group, index (ALONE: without a group)
    attempts   request, instance, place (from 1), context and earlier response tokens, turn, seconds
               waited, since what and why (of `metrics.waits`), outcome (of `metrics.attempt_spans`)
    spans      attempt, start, length, version, tokens
    fleet      width_s of a bucket of time; by name the level in each
    marks      (seconds, kind, in words): versions, batches, instances that came and went
    curves     of each step: seconds by which so many of its samples were finished, evenly from none
               to all
    lengths    quantiles of the response tokens that were trained, evenly from 0 to 1
    """

    end_s: float
    instances: list[str]
    groups: list[str]
    requests: dict[str, Column]
    attempts: dict[str, Column]
    spans: dict[str, Column]
    fleet: dict[str, Any]
    marks: list[tuple[float, str, str]]
    lengths: list[int]
    curves: list[list[float]] = []

    def __len__(self) -> int:
        """Attempts."""
        return len(self.attempts["request"])

    def thinned(self, each: int) -> RunRecord:
        """With the attempts of every so-manieth request alone."""
        keep = self.attempts["request"].astype(np.int64) % each == 0
        number = np.cumsum(keep) - 1
        of_spans = self.spans["attempt"]
        kept_spans = keep[of_spans]
        spans = {name: column[kept_spans] for name, column in self.spans.items()}
        spans["attempt"] = number[spans["attempt"]].astype(of_spans.dtype)
        attempts = {name: column[keep] for name, column in self.attempts.items()}
        return msgspec.structs.replace(self, attempts=attempts, spans=spans)


def quantiles(values: Any) -> list[int]:
    """Of whole numbers, evenly from the least to the most; none of none."""
    if not len(values):
        return []
    at = np.quantile(np.asarray(values), np.linspace(0, 1, QUANTILES), method="inverted_cdf")
    return [int(value) for value in at]
