"""What our own presets reach against their targets: `python benchmarks/best_presets.py`.

The ratio is the total time of `round_robin_sync` over theirs, at 64 prompts a step, as the mean and
the range over seeds that shuffle the prompts. In rows with "known", half of each prompt's samples
(two of five) are held out: the trainer knows their lengths, and the others are trained. Output is
Markdown. If staleness is allowed, the first and the last step have a large weight in a run of few
steps: --epochs N trains the prompts N times, with as many samples each time.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from rollout_sched.config import load_policy
from rollout_sched.simulators import traces
from rollout_sched.simulators.replay import load_scenario
from rollout_sched.simulators.replay.runs import Run, replay

LRM, M8, TAU = "lrm_token_economy", "composite_math_512x8", "composite_tau_256x8"
BIG, SMALL, APART = "qwen32b-16xh100", "qwen7b-8xh100", "qwen7b-8xh100-disaggregated"

#: Known samples of a prompt, and the number of others that are trained.
KNOWN = {LRM: (2, 3), M8: (4, 4), TAU: (4, 4)}


class Row(NamedTuple):
    """`policy`: a preset, with parameters that are changed. `wanted`: the target ratio."""

    policy: str
    trace: str
    scenario: str
    wanted: float | None
    known: bool = False


SET_BACK = "best_on_policy batching.over_prompts=1.5"
AT_FOUR = "best_async freshness.max_staleness=4"

ROWS = (
    Row("best_on_policy", LRM, SMALL, 1.7, known=True),
    Row("best_on_policy", M8, SMALL, 1.4, known=True),
    Row("best_on_policy", TAU, SMALL, 1.4, known=True),
    Row("best_on_policy", LRM, BIG, 1.6, known=True),
    Row("best_on_policy", M8, BIG, 1.2, known=True),
    Row("best_on_policy", LRM, SMALL, 1.45),
    Row("best_on_policy", M8, SMALL, 1.25),
    Row("best_on_policy", TAU, SMALL, 1.35),
    Row("best_on_policy", LRM, BIG, None),
    Row("best_on_policy", M8, BIG, None),
    Row("best_on_policy", LRM, APART, 1.5),
    Row("best_on_policy", M8, APART, 1.6),
    Row("best_async", LRM, APART, 2.3),
    Row("best_async", M8, APART, 2.2),
    Row(AT_FOUR, LRM, APART, None),
    Row(AT_FOUR, M8, APART, None),
    Row(SET_BACK, LRM, SMALL, None, known=True),
    Row(SET_BACK, M8, SMALL, None, known=True),
    Row(SET_BACK, LRM, APART, None),
    Row(SET_BACK, M8, APART, None),
)


def measure(row: Row, prompts_per_step: int, seeds: int, *, epochs: int) -> list[list[Run]]:
    """The runs of `round_robin_sync` and of the row, by seed."""
    trace = traces.read(row.trace)
    known, trained = KNOWN[row.trace] if row.known else (0, trace.group_size)
    scenario = load_scenario(row.scenario).with_job(
        {
            "prompts_per_step": prompts_per_step,
            "known_samples": known,
            "samples_per_prompt": trained,
            "epochs": epochs,
        }
    )
    policies = [load_policy("round_robin_sync"), load_policy(row.policy)]
    return replay(trace, policies, scenario, seeds=seeds, jobs=2)


def shown(row: Row, base: list[Run], ours: list[Run]) -> str:
    ratios = [b.summary.total_s / o.summary.total_s for b, o in zip(base, ours, strict=True)]
    mean = sum(ratios) / len(ratios)
    verdict = (
        "-"
        if row.wanted is None
        else f"{row.wanted}: {'met' if mean >= row.wanted else '**missed**'}"
    )

    def average(figure: str) -> float:
        return sum(getattr(o.summary.length_bias, figure) for o in ours) / len(ours)

    cells = [
        row.policy,
        row.trace,
        row.scenario,
        "known" if row.known else "nothing",
        f"{mean:.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        verdict,
        f"{average('mean_ratio'):.3f}",
        f"{average('longest_tenth_kept'):.3f}",
        f"{average('step_ks') - average('step_ks_floor'):.2f}",
        f"{sum(o.summary.staleness_mean for o in ours) / len(ours):.2f}",
        f"{100 * sum(o.gap_to_offered_bound or 0.0 for o in ours) / len(ours):.0f} %",
    ]
    return f"| {' | '.join(cells)} |"


COLUMNS = (
    "policy",
    "trace",
    "scenario",
    "history",
    "ratio",
    "wanted",
    "mean length",
    "longest tenth",
    "step KS beyond chance",
    "mean staleness",
    "above the bound of any policy",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts-per-step", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1, help="how often each prompt is trained")
    parser.add_argument("--policy", choices=sorted({row.policy for row in ROWS}), help="this alone")
    options = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for row in ROWS:
        if options.policy not in (None, row.policy):
            continue
        base, ours = measure(
            row,
            options.prompts_per_step,
            options.seeds,
            epochs=options.epochs,
        )
        print(shown(row, base, ours), flush=True)


if __name__ == "__main__":
    main()
