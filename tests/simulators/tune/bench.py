"""What the tests of tuning share: settings, a small bench, and figures made to order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.synthetic import synthetic
from rollout_sched.simulators.tune.candidates import Candidate
from rollout_sched.simulators.tune.evaluation import CaseFigures, Evaluator, Task, bench_of
from rollout_sched.simulators.tune.space import Setting
from tests.helpers import make_scenario


def setting(**changes: Any) -> Setting:
    usual: dict[str, Any] = {
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "max_tokens": 100,
        "instances": 2,
        "slots": 16,
        "disaggregated": True,
        "multi_turn": False,
        "max_staleness": 1,
        "context_s": 3e-8,
        "prefill_tokens_per_s": 40_000.0,
        "weights_tokens": 250_000.0,
        "remembers": False,
    }
    return Setting(**{**usual, **changes})


def small_bench(prompts: int = 18, **scenario: Any) -> Evaluator:
    """Six prompts are held out of eighteen; a run takes milliseconds."""
    world = make_scenario(instances=2, prompts_per_step=4, **scenario)
    return bench_of(synthetic(prompts, 2, median=20, cap=60, seed=1), world, seed=0)


def candidate(**roles: Any) -> Candidate:
    """candidate(batching="sync", over_prompts=1.5): parameters go to the role before them."""
    table: dict[str, dict[str, Any]] = {}
    role = ""
    for key, value in roles.items():
        if key in ("batching", "routing", "ordering", "admission", "prediction", "freshness"):
            role = key
            table[role] = {"use": value}
        else:
            table[role][key] = value
    return Candidate(table)


class Oracle:
    """In place of worker processes: figures by a formula, one second of `now` each.

    `stop_after` raises `error` in place of the answer that comes then.
    """

    def __init__(
        self,
        formula: Callable[[Task], CaseFigures],
        *,
        stop_after: int | None = None,
        error: BaseException | None = None,
    ) -> None:
        self._formula = formula
        self._stop_after = stop_after
        self._error = error or KeyboardInterrupt()
        self.tasks: list[Task] = []
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def answers(
        self, questions: Sequence[Task], left_s: Callable[[], float]
    ) -> Iterator[CaseFigures]:
        for task in questions:
            if left_s() <= 0:
                return
            if len(self.tasks) == self._stop_after:
                self._stop_after = None
                raise self._error
            self.tasks.append(task)
            self.now += 1.0
            yield self._formula(task)


def faster_with_more_prompts(task: Task) -> CaseFigures:
    """Speed and step bias grow with `over_prompts`; seeds differ more than policies do."""
    row = task.table.get("batching", {})
    over = row.get("over_prompts", 1.0) if row.get("use") == "sync" else 1.0
    return CaseFigures(
        tokens_per_s=100.0 * over * (1 + task.case.seed % 7),
        total_s=10.0,
        step_bias=(over - 1.0) / 10,
    )
