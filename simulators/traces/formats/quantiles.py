"""Tables of quantiles, which cannot be replayed."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_sched.simulators.traces.model import Counting, TraceError
from rollout_sched.simulators.traces.rows import Importer, Placed, Row


def _refuse(rows: Iterable[Row], _: Counting) -> Placed:
    """q, ...: quantiles of a distribution. Raises TraceError at the first row."""
    for row in rows:
        raise TraceError(
            row.where,
            "a table of quantiles (column 'q'), not of samples",
            "a replay needs one row per sample: record one, or make one with synthetic()",
            line=1,
        )
    return iter(())


QUANTILES = Importer("quantiles", frozenset({"q"}), _refuse)
