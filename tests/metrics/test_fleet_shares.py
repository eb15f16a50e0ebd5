"""What instances add to the bubbles per second, as they come, work, wait and go."""

from __future__ import annotations

import pytest

from rollout_sched.metrics.bubbles import SHARES, FleetShares

NOTHING = [0.0] * len(SHARES)


@pytest.fixture
def fleet() -> FleetShares:
    """Two instances of four places."""
    shares = FleetShares(4.0)
    shares.join("i")
    shares.join("j")
    return shares


def added(fleet: FleetShares) -> dict[str, float]:
    """By bubble and cause, what is not 0."""
    return {
        f"{bubble} {cause}": share
        for (bubble, cause), share in zip(SHARES, fleet.per_second, strict=True)
        if share
    }


def test_who_does_nothing_is_idle_and_vacant(fleet: FleetShares) -> None:
    assert added(fleet) == {"idle other": 2.0, "vacant other": 2.0}


def test_a_request_fills_a_place(fleet: FleetShares) -> None:
    fleet.load("i", +1)
    assert added(fleet) == {"idle other": 1.0, "vacant other": 1.75}


def test_more_than_fill_the_batch_leave_none_vacant(fleet: FleetShares) -> None:
    fleet.load("i", +6)
    assert added(fleet) == {"idle other": 1.0, "vacant other": 1.0}


def test_who_loads_weights_does_nothing_else(fleet: FleetShares) -> None:
    fleet.load("i", +2)
    fleet.set_updating("i", True)
    assert added(fleet)["idle weight_update"] == added(fleet)["vacant weight_update"] == 1.0
    fleet.set_updating("i", False)
    assert added(fleet) == {"idle other": 1.0, "vacant other": 1.5}


def test_what_waits_inside_is_a_stall(fleet: FleetShares) -> None:
    fleet.load("i", +3)
    fleet.set_queued("i", 2)
    assert added(fleet) == {"idle other": 1.0, "vacant kv_stall": 0.5, "vacant other": 1.25}


def test_who_waits_for_a_tool_is_in_flight_no_more(fleet: FleetShares) -> None:
    fleet.load("i", +1)
    fleet.tool_begins("a/0", "i")
    assert fleet.acting == 1
    assert added(fleet) == {
        "idle tool_wait": 1.0,
        "idle other": 1.0,
        "vacant tool_wait": 0.25,
        "vacant other": 1.75,
    }
    fleet.tool_over("a/0")
    fleet.tool_over("a/0")
    assert fleet.acting == 0
    assert added(fleet) == {"idle other": 2.0, "vacant other": 2.0}


def test_a_tool_may_outlive_its_instance(fleet: FleetShares) -> None:
    fleet.load("i", +1)
    fleet.tool_begins("a/0", "i")
    fleet.leave("i")
    fleet.tool_over("a/0")
    assert added(fleet) == {"idle other": 1.0, "vacant other": 1.0}


def test_who_is_lent_adds_nothing_until_it_is_back(fleet: FleetShares) -> None:
    fleet.lend("i")
    fleet.set_queued("i", 1)
    assert (len(fleet), fleet.here) == (2, 1)
    assert added(fleet) == {"idle other": 1.0, "vacant other": 1.0}
    fleet.take_back("i")
    fleet.take_back("i")
    assert fleet.here == 2
    assert added(fleet)["idle other"] == 2.0


def test_one_that_is_lost_while_it_is_lent_has_gone_once(fleet: FleetShares) -> None:
    fleet.lend("i")
    fleet.leave("i")
    fleet.take_back("i")
    assert (len(fleet), fleet.here) == (1, 1)


def test_when_all_have_gone_nothing_is_left(fleet: FleetShares) -> None:
    fleet.load("i", +3)
    fleet.set_updating("j", True)
    fleet.leave_all()
    assert fleet.per_second == NOTHING
    assert (len(fleet), fleet.here) == (0, 0)


def test_who_joins_again_begins_anew(fleet: FleetShares) -> None:
    fleet.load("i", +3)
    fleet.join("i")
    assert fleet.here == 2
    assert added(fleet) == {"idle other": 2.0, "vacant other": 2.0}
