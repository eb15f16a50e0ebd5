"""Each format can be told from those that are tried before it."""

from __future__ import annotations

from itertools import combinations

from rollout_sched.simulators.traces.store import IMPORTERS, recognised


def test_no_format_hides_another() -> None:
    for earlier, later in combinations(IMPORTERS, 2):
        assert not earlier.columns <= later.columns, (earlier.about, later.about)


def test_each_is_found_by_its_columns_whatever_else_is_there() -> None:
    for importer in IMPORTERS:
        assert recognised("x", 1, [*importer.columns, "more"]) is importer
        assert importer.about
