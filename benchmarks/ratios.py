"""How much better an arm is than another, on the trace and on resamples of its prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from rollout_sched.simulators.replay import Ratio, ratio_of
from rollout_sched.simulators.replay.runs import Run

Measure = Literal["total", "rollout", "tokens", "bubble"]


def vacant_in_rollout(run: Run) -> float:
    """Share of the fleet's places (an even share of a batch's samples each) that were vacant while
    anything was in flight. Training on the same GPUs does not count as a bubble of the rollout."""
    places = sum(step.capacity_s for step in run.steps)
    taken = places - sum(sum(step.vacant_s.values()) for step in run.steps)
    seconds = run.steps[-1].end_s - run.steps[0].start_s
    in_flight = sum(step.rollout_s for step in run.steps)
    return 1 - taken / (places / seconds * in_flight)


#: Figures that are larger if an arm is better.
FIGURES: dict[Measure, Callable[[Run], float]] = {
    "total": lambda run: 1 / run.summary.total_s,
    "rollout": lambda run: 1 / run.summary.rollout_s,
    "tokens": lambda run: run.summary.equal_length_tokens_per_s,
    "bubble": lambda run: 1 / max(vacant_in_rollout(run), 1e-9),
}


def ratio(baseline: Sequence[Run], arm: Sequence[Run], measure: Measure) -> Ratio:
    """Above 1 if the arm is better. Runs by draw, the same draws for both, the trace first."""
    figure = FIGURES[measure]
    return ratio_of(figure, arm[:1], baseline[:1], arm[1:], baseline[1:])


def shown(ratio: Ratio) -> str:
    if ratio.interval is None:
        return f"{ratio.value:.2f}x"
    return f"{ratio.value:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"
