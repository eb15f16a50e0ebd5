"""Importers of foreign formats: how a format is recognised and its rows become samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rollout_sched.simulators.traces.counting import Counting
from rollout_sched.simulators.traces.model import SamplePlace, SampleRecord
from rollout_sched.simulators.traces.rows import Row

#: Samples, each with its place for error messages.
Placed = Iterator[tuple[SamplePlace, SampleRecord]]


class Importer(NamedTuple):
    """columns: the columns that identify a file of this format.

    convert: keeps lengths, counts and times, turns further columns into labels, and raises
        TraceError at the first row that it cannot use. Rows may be of several files, in order.
    """

    about: str
    columns: frozenset[str]
    convert: Callable[[Iterable[Row], Counting], Placed]
