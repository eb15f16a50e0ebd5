"""How much better an arm is than another, on the trace and on resamples of its prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from rollout_sched.simulators.replay.comparison import Ratio, ratio_of
from rollout_sched.simulators.replay.runs import Run

Measure = Literal["total", "rollout", "tokens", "idle"]

#: What is larger where an arm is better.
FIGURES: dict[Measure, Callable[[Run], float]] = {
    "total": lambda run: 1 / run.summary.total_s,
    "rollout": lambda run: 1 / run.summary.rollout_s,
    "tokens": lambda run: run.summary.equal_length_tokens_per_s,
    "idle": lambda run: 1 / max(run.summary.idle_bubble, 1e-9),
}


def ratio(baseline: Sequence[Run], arm: Sequence[Run], measure: Measure) -> Ratio:
    """Above 1 where the arm is better. Runs by draw, the same draws of both, the trace first."""
    figure = FIGURES[measure]
    return ratio_of(figure, arm[:1], baseline[:1], arm[1:], baseline[1:])


def shown(ratio: Ratio) -> str:
    if ratio.interval is None:
        return f"{ratio.value:.2f}x"
    return f"{ratio.value:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"
