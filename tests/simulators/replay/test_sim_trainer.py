"""The trainer counts what it has trained, and what will never come."""

from __future__ import annotations

from rollout_sched.core import events as ev
from rollout_sched.core.actions import Deliver, Discard
from rollout_sched.core.model import Sample
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.sim_attempts import SimAttempts
from rollout_sched.simulators.replay.sim_fleet import SimFleet
from rollout_sched.simulators.replay.sim_trainer import SimTrainer
from rollout_sched.simulators.replay.workload import Workload
from tests.helpers import make_scenario, make_trace


class Trained:
    """A trainer before a fleet without work, and what it tells."""

    def __init__(self, scenario: Scenario) -> None:
        workload = Workload(make_trace({"a": [2], "b": [3], "c": [4]}), scenario.job)
        self.told: list[tuple[float, ev.Event]] = []
        self.queue = EventQueue()
        fleet = SimFleet(scenario, SimAttempts(workload), self.queue, self.tell)
        self.trainer = SimTrainer(scenario.trainer, workload, fleet.gpus, self.queue, self.tell)
        self.trainer.start()
        self.run()
        self.told.clear()

    def tell(self, event: ev.Event) -> None:
        self.told.append((self.queue.now, event))

    def run(self) -> None:
        while len(self.queue):
            self.queue.step()

    def deliver(self, *groups: str) -> None:
        samples = tuple(Sample(f"{g}/0", g, 0, 4, 2, (), 0, "stop") for g in groups)
        self.trainer.deliver(Deliver(0, 0, samples))
        self.run()


def test_it_submits_its_prompts_and_asks() -> None:
    world = Trained(make_scenario())
    assert world.trainer.left == 3
    assert world.trainer.standing == "0 of 3 groups trained"


def test_it_publishes_when_a_step_is_over_and_asks_again() -> None:
    world = Trained(make_scenario(train_s=10.0))
    world.deliver("a", "b")
    assert world.told == [(10.0, ev.WeightsPublished(1)), (10.0, ev.BatchRequested())]
    assert world.trainer.left == 1


def test_after_the_last_prompt_it_asks_no_more() -> None:
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


def test_colocated_with_a_fleet_of_nobody_it_does_not_wait() -> None:
    world = Trained(make_scenario(train_s=10.0, colocated=True))
    world.deliver("a")
    assert world.told[0] == (10.0, ev.WeightsPublished(1))
