"""The trainer counts what it has trained, and what will never come."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Deliver, Discard
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.simulators.replay.attempts import SimAttempts
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.fleet import SimFleet
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.sim_trainer import PartTraining, SimTrainer
from rollout_sched.simulators.replay.workload import Workload
from tests.helpers import make_scenario, make_trace


class Trained:
    """A trainer before a fleet without work, and what it tells."""

    def __init__(self, scenario: Scenario) -> None:
        workload = Workload(make_trace({"a": [2], "b": [3], "c": [4]}), scenario.job)
        self.told: list[tuple[float, ev.Event]] = []
        self.queue = EventQueue()
        fleet = SimFleet(scenario, SimAttempts(workload), self.queue, self.tell)
        self.trainer = SimTrainer(
            scenario.trainer, workload, fleet.gpus, fleet.weights, self.queue, self.tell
        )
        self.trainer.start()
        self.run()
        self.told.clear()

    def tell(self, event: ev.Event) -> None:
        self.told.append((self.queue.now, event))

    def run(self) -> None:
        while len(self.queue):
            self.queue.step()

    def deliver(self, *groups: str) -> None:
        self.trainer.deliver(part(*groups))
        self.run()

    def at(self, seconds: float, action: Deliver) -> None:
        self.queue.at(seconds, self.trainer.deliver, action)


def part(*groups: str, number: int = 0, last: bool = True) -> Deliver:
    """Of six tokens a group."""
    samples = tuple(DeliveredSample(f"{g}/0", g, 0, 4, 2, (), 0, "stop") for g in groups)
    return Deliver(0, 0, samples, number, last)


def test_a_trainer_submits_its_prompts_and_requests_a_batch() -> None:
    world = Trained(make_scenario())
    assert world.trainer.left == 3
    assert world.trainer.standing == "0 of 3 groups trained"


def test_a_trainer_publishes_after_a_step_and_requests_again() -> None:
    world = Trained(make_scenario(train_s=10.0))
    world.deliver("a", "b")
    assert world.told == [(10.0, ev.WeightsPublished(1)), (10.0, ev.BatchRequested(parts=True))]
    assert world.trainer.left == 1


def test_a_trainer_stops_requesting_after_the_last_prompt() -> None:
    world = Trained(make_scenario(train_s=10.0))
    world.deliver("a", "b", "c")
    assert world.told == []
    assert (world.trainer.left, world.trainer.over_at) == (0, 10.0)


def test_a_group_that_has_failed_is_waited_for_no_more() -> None:
    world = Trained(make_scenario(train_s=10.0))
    for index in range(2):
        world.trainer.discard(Discard(f"c/{index}", 0, "failed", True, group="c", index=index))
    world.trainer.discard(Discard("direct.1", 0, "failed", True))
    world.trainer.discard(Discard("a/1", 0, "surplus", True, group="a", index=1))
    assert world.trainer.left == 2
    world.deliver("a", "b")
    assert world.trainer.left == 0


def test_colocated_training_does_not_wait_for_an_empty_fleet() -> None:
    world = Trained(make_scenario(train_s=10.0, colocated=True))
    world.deliver("a")
    assert world.told[0] == (10.0, ev.WeightsPublished(1))


def in_parts(*, colocated: bool = False) -> Trained:
    """Six seconds a group and ten a step."""
    scenario = make_scenario(train_s=10.0, colocated=colocated)
    trainer = msgspec.structs.replace(scenario.trainer, seconds_per_token=1.0)
    return Trained(msgspec.structs.replace(scenario, trainer=trainer))


def test_parts_are_trained_as_they_come_and_the_step_is_taken_at_the_end() -> None:
    world = in_parts()
    world.at(1.0, part("a", last=False))
    world.at(20.0, part("b", number=1))
    world.run()
    assert world.told[0] == (20.0 + 6.0 + 10.0, ev.WeightsPublished(1))
    assert world.trainer.left == 1


def test_one_part_after_the_other() -> None:
    world = in_parts()
    world.at(1.0, part("a", last=False))
    world.at(2.0, part("b", number=1, last=False))
    world.at(3.0, part("c", number=2))
    world.run()
    assert (world.trainer.left, world.trainer.over_at) == (0, 1.0 + 18.0 + 10.0)


def test_the_last_part_may_be_empty() -> None:
    world = in_parts()
    world.at(1.0, part("a", "b", last=False))
    world.at(30.0, part(number=1))
    world.run()
    assert world.told == [(40.0, ev.WeightsPublished(1)), (40.0, ev.BatchRequested(parts=True))]


def test_a_group_is_trained_when_its_step_is_taken() -> None:
    world = in_parts()
    world.trainer.deliver(part("a", "b", last=False))
    world.run()
    world.trainer.discard(Discard("c/0", 0, "failed", True, group="c", index=0))
    assert world.trainer.left == 2, "or the run would be over before its last step"


def test_on_shared_gpus_parts_wait_until_the_batch_is_whole() -> None:
    world = in_parts(colocated=True)
    world.at(1.0, part("a", last=False))
    world.at(20.0, part("b", number=1))
    world.run()
    assert world.told == [
        (20.0 + 12.0 + 10.0, ev.WeightsPublished(1)),
        (20.0 + 12.0 + 10.0, ev.BatchRequested(parts=True, shares_gpus=True)),
    ]


def test_without_gpus_nothing_is_trained() -> None:
    work = PartTraining(0.0)
    work.add(5.0, 1.0)
    assert work.left_s(100.0) == 5.0


def test_half_of_the_gpus_take_twice_as_long() -> None:
    work = PartTraining(0.0)
    work.add(5.0, 0.0)
    work.set_share(0.5, 2.0)
    assert work.left_s(6.0) == pytest.approx(3.0)
    work.set_share(1.0, 8.0)
    assert work.left_s(9.0) == pytest.approx(1.0)
    assert work.left_s(99.0) == 0.0


def test_parts_are_not_trained_before_they_arrive() -> None:
    work = PartTraining(0.0)
    work.set_share(1.0, 0.0)
    work.add(2.0, 10.0)
    work.add(3.0, 20.0)
    assert work.left_s(20.0) == 3.0
    assert work.left_s(21.0) == 2.0
