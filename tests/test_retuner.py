"""Retuning a scheduler that runs: when the past is looked at, when what is found is adopted."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rollout_sched.cli import main
from rollout_sched.core.model.actions import Action, Deliver
from rollout_sched.core.model.errors import CallerError
from rollout_sched.core.model.events import Event, Retuned
from rollout_sched.retuner import RetunePlan, Retuner, add_flags, ask_a_process, attachment
from rollout_sched.simulators.replay.closed_loop import ClosedLoop
from rollout_sched.simulators.replay.comparison import Ratio
from rollout_sched.simulators.replay.scenario import Job, load_scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.synthetic import synthetic
from rollout_sched.simulators.tune.evaluation import HardLimits
from rollout_sched.simulators.tune.retuning import Better, Question
from tests.helpers import make_policy

POLICY = make_policy(batching={"use": "sync", "over_prompts": 1.0})
SCENARIO = load_scenario("tiny-cpu-2")
PLAN = RetunePlan(4, SCENARIO, HardLimits(0, 0.01, 0.1))
MORE = Better({"batching": {"over_prompts": 1.5}}, Ratio(1.2, 1.1, 1.3))


class Live:
    """A replay in place of a fleet: what a retuner looks at, and may tell."""

    def __init__(self) -> None:
        trace = synthetic(48, 2, median=20, cap=100, prompt_median=9)
        job = Job(prompts_per_step=4)
        self.workload = Workload(trace, job)
        self.scheduler = POLICY.scheduler(4)
        self.view = self.scheduler.view
        self.observers: list[Callable[[float, Event, list[Action]], None]] = []
        self.told: list[tuple[int, Event]] = []
        self.batches = 0
        scenario = msgspec.structs.replace(SCENARIO, job=job)
        self.loop = ClosedLoop(self.scheduler, self.workload, scenario, [self._show])

    @property
    def driver(self) -> Any:
        return self

    @property
    def pump(self) -> Any:
        return self

    def tell(self, event: Event) -> None:
        self.told.append((self.batches, event))

    def _show(self, now: float, event: Event, actions: list[Action]) -> None:
        self.batches += sum(isinstance(a, Deliver) and a.last for a in actions)
        for observe in self.observers:
            observe(now, event, actions)


def retuned(ask: Callable[..., Better | None]) -> tuple[Live, Retuner]:
    """A whole run, in which answers come at once."""

    async def scene() -> tuple[Live, Retuner]:
        live: Any = Live()
        retuner = Retuner(live, POLICY, 4, PLAN, ask)
        entries: list[Any] = []
        retuned_by, live.observers = live.observers, [lambda *entry: entries.append(entry)]
        live.loop.run()
        live.batches = 0
        for now, event, actions in entries:
            live.batches += sum(isinstance(a, Deliver) and a.last for a in actions)
            retuned_by[0](now, event, actions)
            if retuner._asking is not None:
                await asyncio.wait({retuner._asking})
        await retuner.close()
        return live, retuner

    return asyncio.run(scene())


def test_every_so_many_steps_these_steps_are_asked_about() -> None:
    asked: list[Question] = []

    def ask(question: Question, stopped: Callable[[], bool]) -> None:
        asked.append(question)

    live, retuner = retuned(ask)
    assert live.batches == 12
    assert [len(question.trace.groups) for question in asked] == [16, 16, 16]
    assert not set(asked[0].trace.groups) & set(asked[1].trace.groups)
    job = asked[0].scenario.job
    assert (job.prompts_per_step, job.samples_per_prompt) == (4, 2)
    assert live.told == []
    assert retuner.adopted == []


def test_what_is_found_is_adopted_with_the_next_batch() -> None:
    live, retuner = retuned(lambda question, stopped: MORE)
    event = Retuned({"batching": {"over_prompts": 1.5}})
    assert live.told == [(5, event), (9, event)]
    assert retuner.adopted == [MORE, MORE]


def test_a_question_that_fails_leaves_the_rollouts_alone(caplog: pytest.LogCaptureFixture) -> None:
    def ask(question: Question, stopped: Callable[[], bool]) -> None:
        raise CallerError("it does not fit that fleet")

    live, _ = retuned(ask)
    assert live.told == []
    assert "it does not fit that fleet" in caplog.text


def test_a_process_answers_and_is_not_waited_for_when_all_stops() -> None:
    trace = synthetic(16, 2, median=20, cap=100, prompt_median=9)
    job = Job(prompts_per_step=4, samples_per_prompt=2, max_tokens=100)
    scenario = msgspec.structs.replace(SCENARIO, job=job)
    question = Question(POLICY, {}, trace, scenario, HardLimits(0, 0.0, 0.0))
    assert ask_a_process(question, lambda: False) is None  # nothing keeps such limits
    assert ask_a_process(question, lambda: True) is None


class TestFlags:
    def options(self, *given: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
        add_flags(parser)
        options = parser.parse_args(given)
        options.policy = "best_async"
        return options

    def test_without_them_nothing_is_attached(self) -> None:
        assert attachment(self.options()) is None

    def test_a_scenario_is_needed(self) -> None:
        with pytest.raises(CallerError, match="--retune-scenario"):
            attachment(self.options("--retune", "steps=20"))

    def test_too_few_steps(self) -> None:
        with pytest.raises(CallerError, match="steps=2: at least 4"):
            attachment(self.options("--retune", "steps=2", "--retune-scenario", "tiny-cpu-2"))

    @pytest.mark.parametrize("said", ["20", "minutes=3", "steps=0", "steps=many"])
    def test_what_is_no_number_of_steps(
        self, said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            main(["serve", "--policy", "dplb", "--instance", "http://a:1", "--retune", said])
        assert "--retune" in capsys.readouterr().err
