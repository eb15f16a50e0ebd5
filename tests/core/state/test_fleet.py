"""The fleet: `least()` against brute force, and the facts that follow from the instances."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_sched.core.model.events import InstanceReported
from rollout_sched.core.model.model import Attempt, Instance, InstanceStatus
from rollout_sched.core.model.roles import SessionAdmission
from rollout_sched.core.state.fleet import ContextLimits, Fleet, OpenInstances
from rollout_sched.core.state.waiting import Shares
from tests.core.told import make_request


def by_tokens(instance: Instance) -> int:
    return instance.tokens


def has_slots(instance: Instance) -> bool:
    return instance.in_flight < instance.slots


def make_fleet(instances: int = 0, *, slots: int = 4, load: Any = by_tokens) -> Fleet:
    fleet = Fleet(load, has_slots, Shares())
    for number in range(instances):
        fleet.join(f"i{number}", slots, 1000, 0)
    return fleet


def send(fleet: Fleet, name: str, *, context: int = 10, expected: int = 0) -> Attempt:
    request = make_request(context_tokens=context)
    request.expected_tokens = expected
    return fleet.send(request, fleet.instances[name], 100)


def least(fleet: Fleet) -> str | None:
    instance = fleet.least()
    return None if instance is None else instance.id


class TestLeast:
    def test_the_first_to_join_wins_a_tie(self) -> None:
        fleet = make_fleet(3)
        assert least(fleet) == "i0"
        send(fleet, "i0")
        assert least(fleet) == "i1"
        send(fleet, "i1")
        send(fleet, "i2")
        assert least(fleet) == "i0"

    def test_a_rejoined_name_is_a_new_instance(self) -> None:
        fleet = make_fleet(2)
        before = fleet.instances["i0"]
        fleet.lose(before)
        fleet.join("i0", 4, 1000, 0)
        assert least(fleet) == "i1", "it joined before the new i0"
        assert fleet.open_instance("i0") is not before


class TestJoining:
    def test_kv_tokens_are_those_of_the_largest(self) -> None:
        fleet = make_fleet()
        assert fleet.contexts.largest is None
        for name, kv_tokens, largest in [("i0", 40, 40), ("i1", 50, 50), ("i2", 30, 50)]:
            fleet.join(name, 1, kv_tokens, 0)
            assert fleet.contexts.largest == fleet.contexts.most == largest
        for name, left in [("i1", 40), ("i0", 30), ("i2", None)]:
            fleet.lose(fleet.instances[name])
            assert fleet.contexts.largest == left
            assert fleet.contexts.most == 50

    def test_the_version_is_the_oldest_that_may_generate(self) -> None:
        fleet = make_fleet()
        assert fleet.version is None
        one, other = fleet.join("i0", 1, 10, 3), fleet.join("i1", 1, 10, 5)
        assert fleet.version == 3
        fleet.set_version(one, 6)
        assert fleet.version == 5
        fleet.lose(other)
        assert fleet.version == 6


class TestAttempts:
    def test_an_attempt_remembers_the_version_it_began_with(self) -> None:
        fleet = make_fleet(1)
        attempt = send(fleet, "i0")
        fleet.set_version(fleet.instances["i0"], 4)
        assert attempt.version == 0
        assert send(fleet, "i0").version == 4

    @pytest.mark.parametrize(
        ("expected", "made", "counted"), [(0, 0, 10), (30, 0, 40), (30, 20, 20), (999, 0, 110)]
    )
    def test_the_load_is_context_and_expected_tokens(
        self, expected: int, made: int, counted: int
    ) -> None:
        fleet = make_fleet(1)
        request = make_request()
        request.expected_tokens, request.response_tokens = expected, made
        attempt = fleet.send(request, fleet.instances["i0"], 100)
        assert fleet.instances["i0"].tokens == counted
        fleet.close(attempt)
        assert fleet.instances["i0"].tokens == 0

    @pytest.mark.parametrize(("expected", "counted"), [(-5, 10), (20, 30), (999, 110)])
    def test_a_prediction_is_bounded_by_the_limit(self, expected: int, counted: int) -> None:
        fleet = make_fleet(1)
        fleet.expect(send(fleet, "i0", expected=50), expected)
        assert fleet.instances["i0"].tokens == counted


def test_the_open_list_knows_every_place() -> None:
    fleet = make_fleet(4)
    for name in ("i1", "i3", "i0"):
        instance = fleet.instances[name]
        instance.status = InstanceStatus.UPDATING
        fleet.touch(instance)
        assert fleet.open_instance(name) is None
        assert [i.open_index for i in fleet.open] == list(range(len(fleet.open)))
    assert fleet.open == [fleet.instances["i2"]]
    assert fleet.open_instance("i2") is fleet.instances["i2"]
    assert fleet.open_instance("nobody") is None


class BruteForce(RuleBasedStateMachine):
    """Everything a fleet can go through, and every answer computed from its instances anew."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = make_fleet()
        self.names = count()
        self.most = 0  # instances at once

    def pick(self, data: st.DataObject) -> Instance:
        return self.fleet.instances[data.draw(st.sampled_from(sorted(self.fleet.instances)))]

    @rule(slots=st.integers(1, 3), kv_tokens=st.integers(1, 5), version=st.integers(0, 3))
    def join(self, slots: int, kv_tokens: int, version: int) -> None:
        self.fleet.join(f"i{next(self.names)}", slots, kv_tokens, version)

    @precondition(lambda self: self.fleet.instances)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.fleet.lose(self.pick(data))

    @precondition(lambda self: self.fleet.open)
    @rule(data=st.data(), context=st.integers(1, 3), expected=st.integers(0, 3))
    def send(self, data: st.DataObject, context: int, expected: int) -> None:
        places = st.integers(0, len(self.fleet.open) - 1)
        name = self.fleet.open[data.draw(places)].id
        send(self.fleet, name, context=context, expected=expected)

    @precondition(lambda self: self.fleet.attempts)
    @rule(data=st.data(), expected=st.none() | st.integers(0, 4))
    def answer_or_expect(self, data: st.DataObject, expected: int | None) -> None:
        attempt = self.fleet.attempts[data.draw(st.sampled_from(sorted(self.fleet.attempts)))]
        if expected is None:
            self.fleet.close(attempt)
        else:
            self.fleet.expect(attempt, expected)

    @precondition(lambda self: self.fleet.instances)
    @rule(data=st.data(), status=st.sampled_from(InstanceStatus), rest=st.sampled_from([0.0, 9.0]))
    def change(self, data: st.DataObject, status: InstanceStatus, rest: float) -> None:
        instance = self.pick(data)
        instance.status, instance.rests_until = status, rest
        self.fleet.touch(instance)

    @precondition(lambda self: self.fleet.instances)
    @rule(data=st.data(), version=st.integers(0, 3))
    def update(self, data: st.DataObject, version: int) -> None:
        self.fleet.set_version(self.pick(data), version)

    @precondition(lambda self: self.fleet.instances)
    @rule(data=st.data(), times=st.integers(1, 99))
    def touch(self, data: st.DataObject, times: int) -> None:
        instance = self.pick(data)
        for _ in range(times):
            self.fleet.touch(instance)

    @invariant()
    def agrees(self) -> None:
        fleet = self.fleet
        everyone = list(fleet.instances.values())
        may = [
            i
            for i in everyone
            if i.status is InstanceStatus.SERVING and not i.rests_until and has_slots(i)
        ]
        assert sorted(fleet.open, key=lambda i: i.serial) == may
        assert [i.open_index for i in fleet.open] == list(range(len(may)))
        assert fleet.least() is min(may, key=lambda i: (i.tokens, i.serial), default=None)
        assert all((fleet.open_instance(i.id) is i) == (i in may) for i in everyone)
        assert fleet.version == min((i.version for i in everyone), default=None)
        assert fleet.contexts.largest == max((i.kv_tokens for i in everyone), default=None)
        self.most = max(self.most, len(everyone))
        assert len(fleet._ranked._heap) <= 64 + 4 * self.most


TestBruteForce = BruteForce.TestCase


class TwoSessions(SessionAdmission):
    """At most two, none if the last poll says that the cache is full."""

    def admits(self, instance: Instance) -> bool:
        return has_slots(instance)

    def observe(self, instance: Instance, report: InstanceReported) -> Any:
        return report.kv_usage

    def begins(self, instance: Instance) -> bool:
        return instance.sessions < 2 and instance.observed != 1.0

    def continues(self, instance: Instance) -> bool:
        return True


class TestSessions:
    def fleet(self) -> Fleet:
        fleet = Fleet(by_tokens, has_slots, Shares(), TwoSessions())
        for name in ("i0", "i1"):
            fleet.join(name, 4, 1000, 0)
        return fleet

    def test_kept_between_two_turns_and_left_at_the_next(self) -> None:
        fleet = self.fleet()
        first = send(fleet, "i0")
        send(fleet, "i0")
        assert (fleet.sessions.taking, fleet.instances["i0"].accepts_sessions) == (1, False)
        fleet.close(first)
        assert fleet.sessions.taking == 2
        fleet.retain_kv(first.request, fleet.instances["i0"])
        assert (fleet.sessions.taking, fleet.instances["i0"].sessions) == (1, 2)
        fleet.send(first.request, fleet.instances["i1"], 5)
        assert (fleet.sessions.taking, fleet.instances["i0"].sessions) == (2, 1)
        assert first.request.kv_instance is None

    def test_only_one_without_kv_asks_whether_it_may_begin(self) -> None:
        fleet = self.fleet()
        full, other = fleet.instances.values()
        kept, new = make_request("a/0"), make_request("b/0")
        fleet.retain_kv(kept, full)
        send(fleet, "i0")
        assert [fleet.sessions.may_begin(new, i) for i in (full, other)] == [False, True]
        assert [fleet.sessions.may_begin(kept, i) for i in (full, other)] == [True, True]
        assert make_fleet(1).sessions.may_begin(new, full), "nobody bounds sessions"

    def test_a_report_may_let_none_begin_and_a_closed_instance_lets_none(self) -> None:
        fleet = self.fleet()
        i0 = fleet.instances["i0"]
        fleet.report(i0, InstanceReported("i0", 0, 0, 1.0))
        assert (fleet.sessions.taking, i0.observed) == (1, 1.0)
        fleet.report(i0, InstanceReported("i0", 0, 0, 0.5))
        assert fleet.sessions.taking == 2
        fleet.lose(i0)
        assert fleet.sessions.taking == 1

    def test_dispatches_since_the_last_report_are_counted(self) -> None:
        fleet = make_fleet(1)
        send(fleet, "i0")
        fleet.close(send(fleet, "i0"))
        assert fleet.instances["i0"].unreported == 2
        fleet.report(fleet.instances["i0"], InstanceReported("i0", 1, 0, 0.5))
        assert fleet.instances["i0"].unreported == 0

    @pytest.mark.parametrize("counts", [True, False])
    def test_finished_contexts_are_counted_on_request(self, counts: bool) -> None:
        fleet = Fleet(by_tokens, has_slots, Shares(), counts_finished=counts)
        i0 = fleet.join("i0", 4, 1000, 0)
        attempt = send(fleet, "i0", context=70)
        attempt.request.last_instance = "i0"
        fleet.close(attempt)
        fleet.finished(attempt.request)
        assert (i0.finished, i0.finished_tokens) == ((1, 70) if counts else (0, 0))


def instances(*kv_tokens: int) -> list[Instance]:
    return [Instance(f"i{n}", n, 8, size, 0) for n, size in enumerate(kv_tokens)]


def test_removal_leaves_no_gap() -> None:
    ranked = OpenInstances(by_tokens)
    i0, i1, i2 = here = instances(8, 8, 8)
    for instance in here:
        ranked.put(instance)
    ranked.remove(i0)
    assert ranked.open == [i2, i1]
    assert [i.open_index for i in here] == [-1, 1, 0]
    assert ranked.least() is i1, "it joined before i2"
    ranked.remove(i1)
    ranked.remove(i2)
    assert ranked.open == []
    assert ranked.least() is None


def test_a_request_fits_with_all_that_it_may_become() -> None:
    sizes = ContextLimits()
    small, middle, large = instances(30, 110, 500)
    sizes.update([small, middle, large])
    request = make_request(context_tokens=10)
    assert request.context_tokens + request.remaining_tokens == 110
    assert [sizes.fits(request, each) for each in (small, middle, large)] == [False, True, True]


def test_oversized_request_fits_the_largest_instance() -> None:
    """Its response is cut there; where less fits it would be cut sooner."""
    sizes = ContextLimits()
    small, middle = instances(30, 60)
    sizes.update([small, middle])
    request = make_request(context_tokens=10)
    assert [sizes.fits(request, each) for each in (small, middle)] == [False, True]
