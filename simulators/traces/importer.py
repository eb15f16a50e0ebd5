"""What a foreign format is: how it is recognised, and what makes samples of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rollout_sched.simulators.traces.counting import Counting
from rollout_sched.simulators.traces.model import SamplePlace, SampleRecord
from rollout_sched.simulators.traces.rows import Row

#: Samples, each with the place that is to blame for it.
Placed = Iterator[tuple[SamplePlace, SampleRecord]]


class Importer(NamedTuple):
    """columns: what a file of this format must have, by which it is recognised.

    convert: keeps lengths, counts and times, turns further columns into labels, and stops at the
        first row it cannot use, by a TraceError. Rows may be of several files, in order.
    """

    about: str
    columns: frozenset[str]
    convert: Callable[[Iterable[Row], Counting], Placed]
