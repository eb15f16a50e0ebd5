"""Weight updates: each path from the gate that closes to the gate that opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollout_sched.core.decide.weights import WeightUpdater
from rollout_sched.core.errors import PolicyError
from rollout_sched.core.model.actions import Action, Pause, Resume, UpdateWeights
from rollout_sched.core.model.model import Attempt, Instance, InstanceStatus
from rollout_sched.core.model.roles import Weights
from rollout_sched.policies.interruption import NoInterruption, Partial
from rollout_sched.policies.weights import AllAtOnce
from tests.core.told import make_parts, make_request

SERVING, DRAINING, PAUSING, UPDATING, GATED, _LENDING, _LENT, LOST = InstanceStatus


class OneByOne(Weights):
    """The next only when the one before serves again."""

    def choose(self, outdated: Sequence[Instance], progress: Any) -> Sequence[Instance]:
        return outdated[:1]


class Bench:
    """An updater with instances i0, i1, ...; the numbers in `busy` hold one attempt."""

    def __init__(
        self,
        instances: int,
        busy: Sequence[int] = (),
        interruption: Any = None,
        weights: Any = None,
    ) -> None:
        self.state = make_parts(
            weights=weights or AllAtOnce(), interruption=interruption or NoInterruption()
        ).state
        self.fleet, self.groups = self.state.fleet, self.state.groups
        self.instances = [self.fleet.join(f"i{n}", 4, 100, 0) for n in range(instances)]
        self.attempts = {n: self.send(n) for n in busy}
        self.updater = WeightUpdater(self.state)
        self.aborted: list[Instance] = []

    def send(self, number: int) -> Attempt:
        return self.fleet.send(make_request(), self.instances[number], 10)

    def newest(self, version: int, *, loads: bool = True) -> None:
        """The trainer publishes; nothing is started yet."""
        self.state.progress.version, self.state.progress.loads = version, loads
        self.updater.published()

    def publish(self, version: int) -> list[Action]:
        self.newest(version)
        return self.start()

    def start(self) -> list[Action]:
        self.aborted = self.updater.start()
        return self.orders()

    def join(self, name: str, version: int) -> list[Action]:
        self.instances.append(self.fleet.join(name, 4, 100, version))
        self.updater.joined(self.instances[-1])
        return self.orders()

    def answer(self, number: int) -> list[Action]:
        """The attempt of this instance ends, as the scheduler would have it."""
        self.fleet.close(self.attempts.pop(number))
        if not self.instances[number].attempts:
            self.updater.emptied(self.instances[number])
        return self.orders()

    def paused(self, number: int) -> list[Action]:
        assert self.updater.paused(self.instances[number])
        return self.orders()

    def updated(self, number: int, version: int) -> list[Action]:
        assert self.updater.updated(self.instances[number], version)
        return self.orders()

    def orders(self) -> list[Action]:
        """The actions since the last look."""
        orders = self.state.orders[:]
        self.state.orders.clear()
        return orders

    @property
    def statuses(self) -> list[InstanceStatus]:
        return [instance.status for instance in self.instances]

    @property
    def open(self) -> set[str]:
        return {instance.id for instance in self.fleet.open}


class TestIdle:
    @pytest.mark.parametrize("how", ["drain", "in_place", "resubmit"])
    def test_needs_no_pause(self, how: Any) -> None:
        bench = Bench(1, interruption=Partial(at_update=how))
        assert bench.publish(1) == [UpdateWeights("i0", 1)]
        assert not bench.aborted


class TestDrain:
    def test_finishes_first_and_takes_nothing_new(self) -> None:
        bench = Bench(1, busy=[0])
        assert bench.publish(1) == []
        assert bench.statuses == [DRAINING]
        assert not bench.open
        assert bench.fleet.version == 0
        assert bench.answer(0) == [UpdateWeights("i0", 1)]
        assert bench.statuses == [UPDATING]
        assert bench.fleet.version == 1
        assert bench.updated(0, 1) == []
        assert bench.open == {"i0"}

    def test_waits_for_the_last_attempt(self) -> None:
        bench = Bench(1, busy=[0])
        bench.send(0)
        bench.publish(1)
        assert bench.answer(0) == []
        assert bench.statuses == [DRAINING]


class TestInPlace:
    @pytest.mark.parametrize(("kv", "clear"), [("retain", False), ("recompute", True)])
    def test_requests_freeze_and_go_on(self, kv: Any, clear: bool) -> None:
        bench = Bench(1, busy=[0], interruption=Partial(kv=kv, at_update="in_place"))
        assert bench.publish(1) == [Pause("i0", "keep", clear)]
        assert bench.statuses == [PAUSING]
        assert not bench.aborted
        assert bench.paused(0) == [UpdateWeights("i0", 1)]
        assert bench.statuses == [UPDATING]
        assert bench.fleet.version == 0, "what is frozen may still be of the old version"
        assert bench.updated(0, 1) == [Resume("i0")]
        assert bench.statuses == [SERVING]
        assert bench.fleet.version == 1


class TestResubmit:
    @pytest.mark.parametrize(("kv", "clear"), [("retain", False), ("recompute", True)])
    def test_requests_come_back(self, kv: Any, clear: bool) -> None:
        bench = Bench(2, busy=[0], interruption=Partial(kv=kv, at_update="resubmit"))
        assert bench.publish(1) == [Pause("i0", "abort", clear), UpdateWeights("i1", 1)]
        assert bench.aborted == [bench.instances[0]]
        assert bench.answer(0) == []
        assert bench.paused(0) == [UpdateWeights("i0", 1)]
        assert bench.fleet.version == 1
        assert bench.updated(0, 1) == [Resume("i0")]


class TestCohort:
    def test_opens_together(self) -> None:
        bench = Bench(3)
        bench.publish(1)
        bench.updated(1, 1)
        assert bench.statuses == [UPDATING, GATED, UPDATING]
        bench.updated(0, 1)
        assert not bench.open
        bench.updated(2, 1)
        assert bench.open == {"i0", "i1", "i2"}

    def test_instances_updated_apart_open_apart(self) -> None:
        bench = Bench(2, weights=OneByOne())
        assert bench.publish(1) == [UpdateWeights("i0", 1)]
        assert bench.statuses == [UPDATING, SERVING]
        bench.updated(0, 1)
        assert bench.open == {"i0", "i1"}
        assert bench.start() == [UpdateWeights("i1", 1)]
        assert bench.open == {"i0"}


class TestNewcomer:
    def join(self, bench: Bench, version: int) -> list[Action]:
        return bench.join("new", version)

    def test_with_old_weights_gets_new_ones_first(self) -> None:
        bench = Bench(0)
        bench.publish(2)
        assert self.join(bench, 0) == [UpdateWeights("new", 2)]
        assert not bench.open
        bench.updated(0, 2)
        assert bench.open == {"new"}

    def test_waits_for_no_cohort_and_no_cohort_for_it(self) -> None:
        bench = Bench(2)
        bench.publish(1)
        self.join(bench, 0)
        bench.updated(2, 1)
        assert bench.open == {"new"}
        self.join(bench, 0)
        bench.updated(0, 1)
        bench.updated(1, 1)
        assert {"i0", "i1"} <= bench.open


class TestNewerVersionInTheMiddle:
    def test_gated_instance_is_updated_again(self) -> None:
        bench = Bench(2)
        bench.publish(1)
        bench.updated(0, 1)
        assert bench.publish(2) == [UpdateWeights("i0", 2)]
        bench.updated(0, 2)
        assert bench.open == {"i0"}, "it began apart from i1"
        bench.updated(1, 1)
        assert bench.start() == [UpdateWeights("i1", 2)]

    def test_frozen_requests_freeze_again(self) -> None:
        bench = Bench(1, busy=[0], interruption=Partial())
        bench.publish(1)
        bench.paused(0)
        bench.publish(2)
        assert bench.updated(0, 1) == [Resume("i0")]
        assert bench.start() == [Pause("i0", "keep", clear_cache=True)]


class TestLostInTheMiddle:
    def lose(self, bench: Bench, number: int) -> None:
        bench.updater.lost(bench.instances[number])
        bench.fleet.lose(bench.instances[number])

    def test_the_others_do_not_wait_for_it(self) -> None:
        bench = Bench(3)
        bench.publish(1)
        bench.updated(0, 1)
        bench.updated(1, 1)
        assert not bench.open
        self.lose(bench, 2)
        assert bench.statuses == [SERVING, SERVING, LOST]
        assert bench.open == {"i0", "i1"}

    def test_it_needs_no_weights_any_more(self) -> None:
        bench = Bench(2, weights=OneByOne())
        bench.publish(1)
        self.lose(bench, 1)
        assert not bench.updater.outdated
        bench.updated(0, 1)
        assert bench.start() == []

    def test_a_new_one_of_its_name_owes_no_resume(self) -> None:
        bench = Bench(1, busy=[0], interruption=Partial())
        bench.publish(1)
        bench.paused(0)
        self.lose(bench, 0)
        bench.instances.clear()
        bench.join("i0", 0)
        assert bench.updated(0, 1) == []


class TestNotAskedFor:
    def check(self, bench: Bench, *, paused: bool = False, updated: bool = False) -> None:
        before = bench.statuses, bench.instances[0].version, bench.open
        assert bench.updater.paused(bench.instances[0]) is paused
        assert bench.updater.updated(bench.instances[0], 1) is updated
        assert not bench.orders()
        assert (bench.statuses, bench.instances[0].version, bench.open) == before

    def test_while_serving(self) -> None:
        self.check(Bench(1))

    def test_while_draining(self) -> None:
        bench = Bench(1, busy=[0])
        bench.publish(1)
        self.check(bench)

    def test_behind_the_gate(self) -> None:
        bench = Bench(2)
        bench.publish(1)
        bench.updated(0, 1)
        self.check(bench)


def test_instance_changing_cohorts_waits_for_the_new_one() -> None:
    bench = Bench(3)
    a, b, c = bench.instances
    bench.fleet.set_version(c, 1)
    bench.newest(1)
    bench.start()
    bench.updater.updated(a, 1)
    bench.publish(2)
    assert (a.status, b.status, c.status) == (UPDATING, UPDATING, UPDATING)
    bench.updater.updated(a, 2)
    bench.updater.updated(b, 1)
    assert a.status is GATED, "c, of its own cohort, is not ready"
    bench.updater.updated(c, 2)
    assert (a.status, c.status) == (SERVING, SERVING)


@pytest.mark.parametrize(("reopen", "first"), [("together", GATED), ("alone", SERVING)])
def test_each_may_serve_as_soon_as_it_is_ready(reopen: Any, first: InstanceStatus) -> None:
    bench = Bench(2, weights=AllAtOnce(reopen=reopen))
    bench.publish(1)
    bench.updated(0, 1)
    assert bench.statuses == [first, UPDATING]
    bench.updated(1, 1)
    assert bench.statuses == [SERVING, SERVING]


def test_only_outdated_instances_may_be_chosen() -> None:
    class Everybody(Weights):
        def choose(self, outdated: Sequence[Instance], progress: Any) -> Sequence[Instance]:
            return [stranger]

    bench = Bench(1, weights=Everybody())
    stranger = Instance("i9", 9, 1, 1, 0)
    with pytest.raises(PolicyError, match="needs no update"):
        bench.publish(1)
    assert bench.instances[0].status is SERVING


def told(bench: Bench) -> list[int]:
    return [instance.version for instance in bench.instances]


class TestTheTrainerLoads:
    def test_nothing_is_ordered_and_what_it_has_loaded_is_found(self) -> None:
        bench = Bench(2, busy=[0])
        bench.newest(3, loads=False)
        assert bench.start() == []
        assert bench.updater.found(bench.instances[1], 3)
        assert told(bench) == [0, 3]
        assert bench.fleet.version == 0, "the other lags behind, and that is known"
        assert bench.instances[0].status is bench.instances[1].status is SERVING

    def test_known_version_is_not_found(self) -> None:
        bench = Bench(1)
        bench.newest(3, loads=False)
        assert not bench.updater.found(bench.instances[0], 0)
        assert told(bench) == [0]

    @pytest.mark.parametrize("how", [NoInterruption(), Partial(at_update="resubmit"), Partial()])
    def test_instance_paused_for_our_update_resumes(self, how: Any) -> None:
        """Our update was under way when the trainer brought newer weights."""
        bench = Bench(1, busy=[0], interruption=how)
        bench.publish(1)
        bench.newest(2, loads=False)
        if bench.instances[0].status is PAUSING:
            assert bench.paused(0) == [Resume("i0")]
        else:
            assert bench.answer(0) == []
        assert bench.instances[0].status is SERVING
        assert told(bench) == [0]

    def test_loader_given_later_updates_lagging_instances(self) -> None:
        bench = Bench(2)
        bench.newest(2, loads=False)
        bench.updater.found(bench.instances[0], 2)
        assert bench.publish(2) == [UpdateWeights("i1", 2)]

    def test_found_version_is_not_loaded(self) -> None:
        bench = Bench(2, weights=OneByOne())
        assert bench.publish(1) == [UpdateWeights("i0", 1)]
        assert bench.updater.found(bench.instances[1], 1)
        assert bench.updated(0, 1) == []
        assert bench.start() == []
