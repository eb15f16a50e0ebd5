"""Progress: facts are read where they live, and without instances nothing is out of date."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.model import InstanceStatus, Request
from rollout_sched.core.model.records import DeliveredGroup, Launch
from rollout_sched.core.model.roles import Capacity
from rollout_sched.core.state.fleet import Fleet
from rollout_sched.core.state.groups import JUDGE, LAUNCH, SET_BACK, Groups, SampleBuffer
from rollout_sched.core.state.progress import RECENT_BATCHES, RunProgress
from rollout_sched.core.state.waiting import Shares
from tests.core.told import make_group


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(lambda instance: instance.in_flight, lambda instance: True, Shares())


@pytest.fixture
def groups() -> Groups:
    return Groups()


@pytest.fixture
def samples() -> SampleBuffer:
    return SampleBuffer()


@pytest.fixture
def progress(fleet: Fleet, groups: Groups, samples: SampleBuffer) -> RunProgress:
    return RunProgress(4, 3, fleet, groups, samples)


def test_an_update_is_pending_until_the_last_instance_has_it(
    progress: RunProgress, fleet: Fleet
) -> None:
    one, other = fleet.join("i0", 1, 10, 2), fleet.join("i1", 1, 10, 2)
    assert progress.fleet_version == 2
    assert progress.update_pending
    fleet.set_version(one, 3)
    assert progress.update_pending
    fleet.set_version(other, 3)
    assert progress.fleet_version == 3
    assert not progress.update_pending


def test_instances_that_are_getting_weights_are_counted(
    progress: RunProgress, fleet: Fleet
) -> None:
    for number, status in enumerate(InstanceStatus):
        fleet.join(f"i{number}", 1, 10, 2).status = status
    assert progress.updating == 3


def test_recent_groups_are_kept_on_request(
    fleet: Fleet, groups: Groups, samples: SampleBuffer
) -> None:
    keeping = RunProgress(1, 0, fleet, groups, samples, keeps_recent=True)
    for number in range(RECENT_BATCHES + 1):
        group = make_group(f"g{number}")
        group.finished.append(request := Request("r", group.siblings, group, 0, 0, 9))
        request.response_tokens = number
        keeping.group_delivered(group)
    assert len(keeping.recent) == RECENT_BATCHES
    assert keeping.recent[0] == DeliveredGroup(group.siblings.prompt_tokens, (1,))


def test_recent_groups_are_not_kept_by_default(progress: RunProgress) -> None:
    progress.group_delivered(make_group("g"))
    assert not progress.recent


def test_capacity_is_that_of_the_instances_that_are_here(
    progress: RunProgress, fleet: Fleet
) -> None:
    assert progress.capacity == Capacity(0, 0, 0)
    fleet.join("a", 4, 100, 0)
    fleet.join("b", 2, 50, 0)
    assert progress.capacity == Capacity(2, 6, 150)


def test_round_losses_count_until_replaced(progress: RunProgress, groups: Groups) -> None:
    a, b, c = (make_group(name) for name in "abc")
    for group in (a, b, c):
        groups.add(group)
        groups.move(group, LAUNCH)
    progress.group_lost(a)
    assert progress.lost == 0, "there is no round"
    progress.launched(Launch(fresh=3), 3)
    groups.move(b, JUDGE)
    groups.move(c, SET_BACK)
    for group in (a, b, c):
        progress.group_lost(group)
    assert progress.lost == 2, "who was set back has left the round before"
    progress.launched(Launch(fresh=2), 1)
    assert (progress.lost, progress.round) == (1, Launch(fresh=3))
    progress.batch_delivered()
    assert (progress.lost, progress.round) == (0, None)
