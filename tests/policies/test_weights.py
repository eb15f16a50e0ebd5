"""Weights: which instances start their update."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.policies.routing import LeastRequests
from rollout_sched.policies.weights import AllAtOnce, Rolling
from tests.helpers import Loads, ProgressView


@pytest.mark.parametrize(
    ("when", "active", "chosen"),
    [("now", 0, 2), ("now", 3, 2), ("between_batches", 0, 2), ("between_batches", 3, 0)],
)
def test_all_at_once(when: Any, active: int, chosen: int) -> None:
    loads = Loads(LeastRequests(), 2)
    outdated = (loads[0], loads[1])
    assert len(AllAtOnce(when).choose(outdated, ProgressView(active=active))) == chosen


@pytest.mark.parametrize(("behind", "chosen"), [(1, 0), (3, 0), (4, 2), (5, 2)])
def test_all_at_once_every_so_many_versions(behind: int, chosen: int) -> None:
    loads = Loads(LeastRequests(), 2)
    outdated = (loads[0], loads[1])
    progress = ProgressView(version=8 + behind, fleet_version=8)
    assert len(AllAtOnce(every=4).choose(outdated, progress)) == chosen
    assert AllAtOnce(every=4).least_staleness == 3


@pytest.mark.parametrize(("at_once", "updating", "chosen"), [(1, 0, 1), (1, 1, 0), (3, 1, 2)])
def test_rolling(at_once: int, updating: int, chosen: int) -> None:
    loads = Loads(LeastRequests(), 4)
    outdated = tuple(loads[number] for number in range(4))
    progress = ProgressView(updating=updating)
    assert Rolling(at_once).choose(outdated, progress) == outdated[:chosen]


def test_rolling_from_the_emptiest() -> None:
    loads = Loads(LeastRequests(), 3)
    loads.send(0, 2)
    loads.send(2)
    outdated = tuple(loads[number] for number in range(3))
    chosen = Rolling(2, "emptiest").choose(outdated, ProgressView())
    assert list(chosen) == [loads[1], loads[2]]


def test_complete_groups_do_not_delay_weights() -> None:
    loads = Loads(LeastRequests(), 1)
    progress = ProgressView(complete=4, deferred=2, fresh=9)
    assert AllAtOnce("between_batches").choose((loads[0],), progress)
