"""Tables of quantiles, which cannot be replayed."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_sched.simulators.traces.counting import Counting
from rollout_sched.simulators.traces.importer import Importer, Placed
from rollout_sched.simulators.traces.model import TraceError
from rollout_sched.simulators.traces.rows import Row


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
