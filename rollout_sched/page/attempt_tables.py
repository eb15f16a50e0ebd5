"""Gathers the attempts of a run in growing columns."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollout_sched.core.actions import Dispatch
from rollout_sched.metrics.attempt_spans import OUTCOMES, AttemptSpans, Closed
from rollout_sched.metrics.fold import Fold, Handler
from rollout_sched.metrics.waits import Waits
from rollout_sched.page.run_record import ALONE, Column

_OUTCOME = {outcome: place for place, outcome in enumerate(OUTCOMES)}


class _Table:
    """Growing columns; the types are those of `array`."""

    def __init__(self, **types: str) -> None:
        self._columns = {name: array(kind) for name, kind in types.items()}
        self._append = [column.append for column in self._columns.values()]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def add(self, *row: float) -> int:
        """Append a row and return its number."""
        for append, value in zip(self._append, row, strict=True):
            append(value)  # type: ignore[arg-type]
        return len(self) - 1

    def change(self, place: int, column: str, value: int) -> None:
        self._columns[column][place] = value

    def columns(self) -> dict[str, Column]:
        return {name: np.array(column) for name, column in self._columns.items()}


class AttemptTables:
    """Folds attempts into the tables of a RunRecord.

    instances, groups  name -> number
    """

    def __init__(self) -> None:
        self.instances: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        self._spans = AttemptSpans(self._closed)
        self._waits = Waits()
        self._requests: dict[str, int] = {}
        self._rows: dict[int, int] = {}  # rows of the attempts in flight
        self._tables = _tables()

    @property
    def folds(self) -> tuple[Fold, ...]:
        """All folds, in the order in which they must run."""
        return self._spans, self._waits, self

    @property
    def in_flight(self) -> int:
        return len(self._spans.running)

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {Dispatch: self._dispatched}

    def columns(self, end_s: float) -> dict[str, dict[str, Column]]:
        """The columns by table; attempts that still run end at `end_s`."""
        self._spans.end(end_s)
        return {name: table.columns() for name, table in self._tables.items()}

    def instance(self, name: str) -> int:
        return self.instances.setdefault(name, len(self.instances))

    def _request(self, action: Dispatch) -> int:
        place = self._requests.get(action.request)
        if place is None:
            name, index = action.group, action.index
            if not name:
                name, index = action.request, ALONE
            group = self.groups.setdefault(name, len(self.groups))
            place = self._tables["requests"].add(group, index)
            self._requests[action.request] = place
        return place

    def _dispatched(self, now: float, action: Dispatch) -> None:
        wait = self._waits.last
        self._rows[action.attempt] = self._tables["attempts"].add(
            self._request(action),
            self.instance(action.instance),
            self._spans.running[action.attempt].place,
            action.context_tokens,
            action.response_tokens,
            action.turn,
            wait.seconds,
            wait.since,
            wait.cause,
            _OUTCOME["still running"],
        )

    def _closed(self, closed: Closed) -> None:
        self._waits.closed(closed)
        row = self._rows.pop(closed.attempt.dispatch.attempt)
        self._tables["attempts"].change(row, "outcome", _OUTCOME[closed.outcome])
        for span in closed.spans:
            version = max(0, span.version)
            self._tables["spans"].add(row, span.start_s, span.length_s, version, span.tokens)


def _tables() -> dict[str, _Table]:
    return {
        "requests": _Table(group="I", index="I"),
        "attempts": _Table(
            request="I",
            instance="I",
            place="I",
            context="I",
            before="I",
            turn="I",
            waited="f",
            since="B",
            cause="B",
            outcome="B",
        ),
        "spans": _Table(attempt="I", start="f", length="f", version="I", tokens="I"),
    }
