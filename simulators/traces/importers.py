"""Find the format of a foreign file by its columns."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_sched.simulators.traces.formats import (
    agent_calls,
    areal,
    grouped,
    llm_d,
    quantiles,
    trajectories,
    ungrouped,
    verl,
)
from rollout_sched.simulators.traces.importer import Importer
from rollout_sched.simulators.traces.model import TraceError, brief
from rollout_sched.simulators.traces.native_format import SCHEMA

#: The first whose columns are all present is used.
IMPORTERS: tuple[Importer, ...] = (
    grouped.GROUPED,
    ungrouped.SERVING,
    ungrouped.AZURE,
    ungrouped.VIDUR,
    ungrouped.MOONCAKE,
    trajectories.SHORT_KEYS,
    trajectories.TPU_INFERENCE,
    verl.VERL,
    areal.SESSIONS,
    llm_d.REQUEST_LOG,
    agent_calls.AGENT_CALLS,
    quantiles.QUANTILES,
)


def recognised(where: str, line: int, columns: Iterable[str]) -> Importer:
    """The importer whose columns are all present. Raises TraceError with the nearest if none."""
    columns = list(columns)
    present = set(columns)
    for importer in IMPORTERS:
        if importer.columns <= present:
            return importer
    # The nearest: most columns present, and among equals the fewest missing.
    near = max(IMPORTERS, key=lambda i: (len(i.columns & present), -len(i.columns - present)))
    missing = ", ".join(sorted(near.columns - present))
    if near.columns & present:
        found = f"looks like {near.about}, but lacks: {missing}"
        raise TraceError(where, found, "add the missing columns", line=line, field=missing)
    known = "; ".join(f"{i.about} ({', '.join(sorted(i.columns))})" for i in IMPORTERS)
    shown = ", ".join(brief(repr(column)) for column in columns[:8])
    raise TraceError(
        where,
        f"no known trace format begins with {shown}",
        f"write {SCHEMA!r} (docs/trace_format.md) or one of: {known}",
        line=line,
    )
