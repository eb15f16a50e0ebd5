"""Freshness: admission against the published formula, waiting against brute force."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.policies.freshness import Bounded, Paced, Unbounded
from tests.helpers import ProgressView


def test_unbounded_admits_everything() -> None:
    policy = Unbounded()
    assert policy.room(ProgressView(fresh=7, deferred=2)) == 9
    assert policy.oldest_allowed(100) == 0
    assert not policy.must_wait(ProgressView(version=100), {0: 1000}, 0)


@given(
    staleness=st.integers(0, 8),
    batch=st.integers(1, 64),
    fleet=st.integers(0, 50),
    ahead=st.integers(0, 3),
    in_batch=st.integers(0, 63),
    running=st.integers(0, 500),
)
def test_room_equals_areal_formula_when_each_version_takes_a_batch(
    staleness: int, batch: int, fleet: int, ahead: int, in_batch: int, running: int
) -> None:
    """(S + version of the fleet + 1) * B - (accepted + running)."""
    in_batch, version = min(in_batch, batch - 1), fleet + ahead
    progress = ProgressView(batch, version, fleet, in_batch=in_batch, started=running)
    accepted = version * batch + in_batch
    room = (staleness + fleet + 1) * batch - (accepted + running)
    assert Bounded(staleness).room(progress) == room


def test_room_is_the_same_for_a_trainer_that_resumes_at_a_later_version() -> None:
    rooms = [Bounded(2).room(ProgressView(4, v, v, started=3)) for v in (0, 7)]
    assert rooms == [9, 9]


@given(
    threshold=st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
    trigger=st.integers(1, 8),
    batch=st.integers(1, 64),
    syncs=st.integers(0, 9),
    trained_since=st.integers(0, 7),
    in_batch=st.integers(0, 63),
    under_way=st.integers(0, 500),
)
def test_pacing_is_verl_s(
    threshold: float,
    trigger: int,
    batch: int,
    syncs: int,
    trained_since: int,
    in_batch: int,
    under_way: int,
) -> None:
    """int(required * (1 + threshold) * trigger) - what came or is on its way since the sync."""
    at_sync, in_batch = syncs * trigger, min(in_batch, batch - 1)
    version = at_sync + trained_since
    progress = ProgressView(batch, version, at_sync, in_batch=in_batch, started=under_way)
    most = int(batch * (1 + threshold) * trigger + 1e-9)
    gone = trained_since * batch + in_batch
    assert Paced(threshold, trigger).room(progress) == most - gone - under_way


def test_pacing_bounds_no_single_sample() -> None:
    assert Paced().oldest_allowed(100) == 0
    assert not Paced().must_wait(ProgressView(version=100), {0: 1000}, 0)


@pytest.mark.parametrize(("staleness", "oldest"), [(0, 5), (2, 3), (7, -2)])
def test_oldest_allowed(staleness: int, oldest: int) -> None:
    assert Bounded(staleness).oldest_allowed(5) == oldest


@pytest.mark.parametrize(("when_stale", "masks"), [("drop", False), ("mask", True)])
def test_dropping_and_masking_never_wait(when_stale: Any, masks: bool) -> None:
    policy = Bounded(0, when_stale)
    assert not policy.must_wait(ProgressView(version=9), {0: 50}, 0)
    assert policy.masks is masks


def schedulable(
    remaining: dict[int, int], version: int, staleness: int, batch: int, places: int
) -> bool:
    """Earliest deadline first: into the `places` left at `version`, then `batch` a version."""
    due = sorted(oldest + staleness for oldest, groups in remaining.items() for _ in range(groups))
    at, room = version, places
    while due:
        taken, due = due[:room], due[room:]
        if any(deadline < at for deadline in taken):
            return False
        at, room = at + 1, batch
    return True


@given(
    remaining=st.dictionaries(st.integers(0, 8), st.integers(1, 12), max_size=6),
    version=st.integers(0, 8),
    staleness=st.integers(0, 5),
    batch=st.integers(1, 6),
    places=st.integers(0, 5),
)
def test_waits_only_if_the_rest_would_be_late(
    remaining: dict[int, int], version: int, staleness: int, batch: int, places: int
) -> None:
    places = min(places, batch - 1)
    progress = ProgressView(batch, version=version)
    possible = schedulable(remaining, version, staleness, batch, places)
    assert Bounded(staleness).must_wait(progress, remaining, places) is not possible


@pytest.mark.parametrize(("groups", "waits"), [(4, False), (5, True)])
def test_only_one_batch_of_the_next_version_fits(groups: int, waits: bool) -> None:
    progress = ProgressView(4, version=3)
    assert Bounded(2).must_wait(progress, {2: groups}, 0) is waits


@pytest.mark.parametrize(("groups", "waits"), [(3, False), (4, True)])
def test_due_groups_need_slots_in_the_current_batch(groups: int, waits: bool) -> None:
    assert Bounded(1).must_wait(ProgressView(8, version=3), {2: groups, 3: 5}, 3) is waits
