"""Benefit and cost of rounds of similar lengths: `python benchmarks/like_lengths.py`.

Everything is at staleness 0 and trains every sample that was offered. Each trace is replayed with
some of its samples held out: their lengths are what the trainer knows of a prompt (`known`), and
the others are trained. Rows differ in the window, the bound on each step's bias, how many more
prompts start than a batch takes, and what is known. The last rows train two epochs with nothing
known before the first.

Output is Markdown, one table per trace and scenario: trained tokens per second relative to round
robin, tokens discarded per token trained, the run's mean length and longest tenth as shares of what
was offered, and how far a step's lengths are from all lengths (Kolmogorov-Smirnov, minus that of
random steps). With --redraws, a restarted request does not get the same length again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from rollout_sched.config import PolicyFile, load_policy, parse_policy
from rollout_sched.simulators import traces
from rollout_sched.simulators.replay import load_scenario
from rollout_sched.simulators.replay.comparison import Compared, compared
from rollout_sched.simulators.replay.runs import replay
from rollout_sched.simulators.replay.scenario import Job
from rollout_sched.simulators.traces.model import Trace

#: Traces, and the samples of a prompt that are trained in an epoch; the others are known.
TRACES = {"lrm_token_economy": 2, "composite_math_512x8": 4, "composite_tau_256x8": 4}
SCENARIOS = ("qwen7b-8xh100", "qwen32b-16xh100")
COLUMNS = ("policy", "speed-up", "discarded", "mean", "longest tenth", "step KS")


def policy(
    name: str, over: float, *, window: int = 0, bias: float = 1.0, share: float = 1.0
) -> PolicyFile:
    """Tail batching without over-sampled responses; a window of 0 starts prompts in order."""
    selection: dict[str, Any] = {"use": "in_order"}
    if window:
        selection = {"use": "like_lengths", "window": window, "max_step_bias": bias}
    batching = {"use": "tail_batching", "over_prompts": over, "over_samples": 1.0}
    return parse_policy(
        name,
        {
            "batching": batching | {"long_round_share": share},
            "selection": selection,
            "weights": {"use": "all_at_once", "when": "between_batches"},
        },
    )


def policies() -> Iterator[PolicyFile]:
    """The policies of the rows."""
    yield load_policy("round_robin_sync")
    yield parse_policy("sync, prompts 1.25", {"batching": {"use": "sync", "over_prompts": 1.25}})
    for over in (1.125, 1.25):
        yield policy(f"in order, prompts {over}", over)
    for over in (1.0, 1.125, 1.25):
        yield policy(f"window 8, prompts {over}", over, window=8)
    yield policy("window 8, prompts 1.125, long rounds at 0.5", 1.125, window=8, share=0.5)
    for window in (2, 4):
        yield policy(f"window {window}, prompts 1.125", 1.125, window=window)
    for bias in (0.25, 0.5, 0.75):
        yield policy(f"window 8, bias {bias}, prompts 1.125", 1.125, window=8, bias=bias)


def rows(
    trace: Trace, scenario: str, samples: int, seeds: int, redraws: bool
) -> Iterator[Compared]:
    """All policies with history, and the same few without and over two epochs."""
    base = load_scenario(scenario)

    def under(job: Job, tried: list[PolicyFile]) -> list[Compared]:
        world = msgspec.structs.replace(base, job=msgspec.structs.replace(job, redraws=redraws))
        return compared(replay(trace, tried, world, seeds=seeds))

    known = trace.group_size - samples
    yield from under(Job(samples_per_prompt=samples, known_samples=known), list(policies()))
    baseline = load_policy("round_robin_sync")
    cold = policy("nothing known, window 8, prompts 1.125", 1.125, window=8)
    yield from under(Job(samples_per_prompt=samples), [baseline, cold])[1:]
    epochs = [
        policy("two epochs, in order, prompts 1.25", 1.25),
        policy("two epochs, window 8, prompts 1.125", 1.125, window=8),
    ]
    yield from under(Job(epochs=2), [baseline, *epochs])[1:]


def line(row: Compared) -> str:
    """One row of the table."""
    figures = (
        row.name,
        f"{row.speed_up.value:.2f}x",
        f"{row.discarded_share:.1%}",
        f"{row.mean_ratio:.3f}",
        f"{row.longest_tenth_kept:.3f}",
        f"{row.step_ks_excess:+.3f}",
    )
    return f"| {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--redraws", action="store_true", help="restarts get another sample")
    options = parser.parse_args()
    for name in options.traces.split(","):
        trace = traces.read(name)
        for scenario in options.scenarios.split(","):
            print(f"\n{name}, {scenario}\n\n| {' | '.join(COLUMNS)} |")
            print(f"|---{'|---:' * (len(COLUMNS) - 1)}|")
            samples = TRACES.get(name, 4)
            for row in rows(trace, scenario, samples, options.seeds, options.redraws):
                print(line(row), flush=True)


if __name__ == "__main__":
    main()
