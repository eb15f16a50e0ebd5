"""The data that a page draws of one run: every attempt, in columns, and the fleet over time."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.generic]

#: The index of a request without a group; its group name is the request's own name.
ALONE = 2**32 - 1

#: Number of quantiles of a distribution.
QUANTILES = 201


class RunRecord(msgspec.Struct):
    """One run. Times are seconds of the run's clock; it ends at `end_s`. A column has a value for
    each row.

    instances  names
    groups     names; for a request without a group the request's name
    requests   group, index (ALONE: without a group)
    attempts   request, instance, place (from 1), context and earlier response tokens, turn, seconds
               waited, since what and why (of `metrics.waits`), outcome (of `metrics.attempt_spans`)
    spans      attempt, start, length, version, tokens
    fleet      width_s: width of a time bucket; by name: the level in each bucket
    marks      (seconds, kind, text): versions, batches, instances that joined and left
    curves     for each step: seconds by which a share of its samples was finished, for even shares
               from none to all
    lengths    quantiles of the delivered response lengths, evenly from 0 to 1
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
        """The number of attempts."""
        return len(self.attempts["request"])

    def thinned(self, each: int) -> RunRecord:
        """A record with the attempts of only one in `each` requests."""
        keep = self.attempts["request"].astype(np.int64) % each == 0
        number = np.cumsum(keep) - 1
        of_spans = self.spans["attempt"]
        kept_spans = keep[of_spans]
        spans = {name: column[kept_spans] for name, column in self.spans.items()}
        spans["attempt"] = number[spans["attempt"]].astype(of_spans.dtype)
        attempts = {name: column[keep] for name, column in self.attempts.items()}
        return msgspec.structs.replace(self, attempts=attempts, spans=spans)


def quantiles(values: Any) -> list[int]:
    """Quantiles of whole numbers, evenly from the smallest to the largest; empty for no values."""
    if not len(values):
        return []
    at = np.quantile(np.asarray(values), np.linspace(0, 1, QUANTILES), method="inverted_cdf")
    return [int(value) for value in at]
