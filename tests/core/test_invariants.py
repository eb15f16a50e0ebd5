"""The books: each kind of error in them is found and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollout_sched.core.model.events import BatchRequested, RequestFinished
from rollout_sched.core.model.model import GroupState, InstanceStatus, RequestState, Segment
from rollout_sched.core.state.groups import SPEND
from tests.core.told import FULLY_ASYNC, Told, make_group


@pytest.fixture
def told() -> Told:
    """a/0 has finished and a/1 runs; b is complete; c/0 runs; d/0 waits; e is fresh.

    The only instance has two slots, both taken.
    """
    told = Told(2, slots=2, **(FULLY_ASYNC | {"batching": {"use": "fully_async", "max_groups": 3}}))
    told(BatchRequested())
    told.submit("a", samples=2)
    told.submit("b", "c", "d", "e")
    told(RequestFinished("a/0", 1, 5), RequestFinished("b/0", 3, 5))
    states = {request.id: str(request.state) for request in told.scheduler.parts.requests}
    assert states == {
        "a/0": "finished",
        "a/1": "running",
        "b/0": "finished",
        "c/0": "running",
        "d/0": "waiting",
    }
    return told


CORRUPTIONS: dict[str, tuple[Callable[[Told], object], str]] = {}


def corruption(named: str) -> Callable[[Callable[[Told], object]], Callable[[Told], object]]:
    def keep(corrupt: Callable[[Told], object]) -> Callable[[Told], object]:
        CORRUPTIONS[corrupt.__name__] = corrupt, named
        return corrupt

    return keep


@corruption("<Instance i0 .*: load 21, attempts 20")
def load(told: Told) -> None:
    told.instance("i0").tokens += 1


@corruption("2 groups of 1 fresh ones are in the window")
def a_window_of_groups_that_have_started(told: Told) -> None:
    told.scheduler.state.selection_window.left = 2


@corruption("<Instance i0 .*: open\\?")
def a_place_but_not_in_the_list(told: Told) -> None:
    told.instance("i0").open_index = 0


def open_it(told: Told) -> None:
    told.instance("i0").open_index = 0
    told.scheduler.state.fleet.open.append(told.instance("i0"))


@corruption("<Instance i0 .* is full but open")
def full_but_open(told: Told) -> None:
    open_it(told)


@corruption("<Instance i0 v0 pausing 2/2> is open")
def pausing_but_open(told: Told) -> None:
    open_it(told)
    told.instance("i0").status = InstanceStatus.PAUSING


@corruption("attempts in flight do not add up")
def an_attempt_the_fleet_forgot(told: Told) -> None:
    told.scheduler.state.fleet.attempts.popitem()


@corruption("attempt 2 has no owner")
def a_wanted_attempt_that_is_abandoned(told: Told) -> None:
    told.scheduler.state.fleet.attempts[2].abandoned = "surplus"


@corruption("attempt 2 has no owner")
def an_attempt_its_request_forgot(told: Told) -> None:
    told.request("a/1").attempt = None


@corruption("<Request d/0 ended .*> ended but is in the books")
def ended_but_in_the_books(told: Told) -> None:
    told.request("d/0").state = RequestState.ENDED


@corruption("<Request d/0 waiting")
def waiting_but_not_in_the_queue(told: Told) -> None:
    told.scheduler.parts.requests.waiting.remove(told.request("d/0"))


@corruption("<Request a/0 finished")
def in_the_queue_but_finished(told: Told) -> None:
    told.scheduler.parts.requests.waiting.add(told.request("a/0"), 0)


@corruption("<Request a/0 finished")
def in_the_replay_buffer_but_finished(told: Told) -> None:
    told.scheduler.parts.requests.replay_buffer.add(told.request("a/0"))


@corruption("<Request c/0 acting")
def acting_with_an_attempt(told: Told) -> None:
    told.request("c/0").state = RequestState.ACTING


@corruption("<Request a/0 .*: segments hold 5")
def tokens_in_no_segment(told: Told) -> None:
    told.request("a/0").response_tokens += 1


@corruption("<Request a/0 .* is over its limit")
def more_tokens_than_allowed(told: Told) -> None:
    request = told.request("a/0")
    request.segments += (Segment(0, 96, "i0"),)
    request.response_tokens += 96


@corruption("<Group b active 1/1 v0>")
def complete_but_active(told: Told) -> None:
    told.scheduler.state.groups["b"].state = GroupState.ACTIVE


@corruption("<Group a active 0/2 v0>")
def a_finished_request_its_group_forgot(told: Told) -> None:
    told.scheduler.state.groups["a"].finished.clear()


@corruption("<Request d/0 .* is not in the books")
def a_request_the_books_forgot(told: Told) -> None:
    del told.scheduler.parts.requests._all["d/0"]
    told.scheduler.parts.requests.waiting.remove(told.scheduler.state.groups["d"].requests[0])


@corruption("a request belongs to no group")
def a_request_its_group_forgot(told: Told) -> None:
    told.scheduler.state.groups["d"].requests.clear()


@corruption("<Group a active 1/2 v3> holds older tokens")
def a_group_younger_than_its_tokens(told: Told) -> None:
    told.scheduler.state.groups["a"].oldest_version = 3


@corruption("<Group a fresh 1/2 v0> is misplaced")
def fresh_but_launched(told: Told) -> None:
    told.scheduler.state.groups["a"].state = GroupState.FRESH


@corruption("1 complete groups, counted 2")
def complete(told: Told) -> None:
    told.scheduler.state.sample_buffer.completed(told.scheduler.state.groups["a"])


@corruption("4 started groups, counted 5")
def started(told: Told) -> None:
    told.scheduler.state.sample_buffer.add(make_group("nobody"))


@corruption("<Group e fresh 0/1 vNone> is misplaced")
def a_fresh_group_nobody_will_launch(told: Told) -> None:
    told.scheduler.state.groups._by_state[GroupState.FRESH].clear()


@corruption("<Group d active .*: nothing of it can go on")
def active_but_all_parked(told: Told) -> None:
    told.scheduler.parts.requests.park(told.request("d/0"))


@corruption("<Group d spent .*: something of it can go on")
def spent_but_one_waits(told: Told) -> None:
    told.scheduler.state.groups.move(told.scheduler.state.groups["d"], SPEND)


@corruption("spent groups wait although the batch lacks groups")
def spent_but_wanted(told: Told) -> None:
    told.scheduler.parts.requests.park(told.request("d/0"))
    told.scheduler.state.groups.move(told.scheduler.state.groups["d"], SPEND)
    told.scheduler.state.progress.prompts_per_step = 4


@corruption("<Request d/0 .*> has left <Instance i0")
def kept_but_not_at_home(told: Told) -> None:
    told.instance("i0").resident["d/0"] = told.request("d/0")


@corruption("<Request d/0 .*> is not at home")
def at_home_but_not_kept(told: Told) -> None:
    told.request("d/0").kv_instance = told.instance("i0")


@corruption("<Instance i0 .*: takes new ones?")
def takes_new_ones_without_a_bound(told: Told) -> None:
    told.instance("i0").accepts_sessions = True


@corruption("instances that take new ones")
def more_take_new_ones_than_there_are(told: Told) -> None:
    told.scheduler.state.fleet.sessions.taking = 1


@corruption("<Request d/0 .*> waits although <Instance i0 .* is open")
def idle_capacity(told: Told) -> None:
    told.instance("i0").slots += 1
    told.scheduler.state.fleet.touch(told.instance("i0"))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_error_in_the_books_is_named(told: Told, name: str) -> None:
    told.scheduler.check_invariants()
    corrupt, named = CORRUPTIONS[name]
    corrupt(told)
    with pytest.raises(AssertionError, match=named):
        told.scheduler.check_invariants()
