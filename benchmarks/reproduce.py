"""The headlines of the literature, replayed: `make reproduction`.

Every claim of `benchmarks/claims.py` is run on several draws of its workload, both arms on the
same. What was run is kept in build/runs until the sources change. `python -m benchmarks.reproduce
--only TEXT` takes the systems that have this in their names.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.cells import Cell, command, default_jobs, run_all
from benchmarks.claims import CLAIMS, NOT_EXPRESSED, Claim
from benchmarks.ratios import ratio, shown
from rollout_sched.simulators.replay.runs import Run

KEPT = Path("build/runs")

HEAD = """# The literature's headlines, replayed

    {command}

writes this page. Each line compares a headline of a paper or project with our closed loop's result
for the same mechanism in the nearest available scenario. Both arms replay the same prompts to the
end and train every one. The ratio is above 1 where the system is better than its baseline;
{interval}.
Nothing was tuned to match a headline: published lengths, fleets, batches and training seconds are
used, the rest is as in the shipped scenarios. The machines, engines and models of the papers differ
from ours. So a ratio that agrees means that the mechanism explains the headline. A ratio that does
not agree means that something else contributed, or that the scenarios differ too much. The
scenarios and the variants of presets are in
[benchmarks/reproduction](../benchmarks/reproduction), the claims in
[benchmarks/claims.py](../benchmarks/claims.py).
"""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    claims = [claim for claim in CLAIMS if options.only.lower() in claim.system.lower()]
    arms = {
        claim: [_draws(arm, options.draws) for arm in (claim.baseline, claim.arm)]
        for claim in claims
    }
    cells = [cell for both in arms.values() for arm in both for cell in arm]
    runs = run_all(list(dict.fromkeys(cells)), options.kept, options.jobs)
    lines = [_line(claim, *([runs[c] for c in arm] for arm in arms[claim])) for claim in claims]
    text = _document(claims, lines, options)
    if options.out:
        options.out.write_text(text)
    else:
        print(text)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--draws", type=int, default=4, help="for the interval")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="processes")
    parser.add_argument("--only", default="", metavar="TEXT", help="systems with this in the name")
    parser.add_argument("--kept", type=Path, default=KEPT, help="where runs are kept")
    parser.add_argument("--out", type=Path, default=None, help="the page; else it is printed")
    options = parser.parse_args(arguments)
    options.command = command("reproduce", options, parser)
    return options


def _draws(cell: Cell, draws: int) -> list[Cell]:
    return [msgspec.structs.replace(cell, draw=draw) for draw in range(draws + 1)]


def _line(claim: Claim, baseline: Sequence[Run], arm: Sequence[Run]) -> list[str]:
    got = ratio(baseline, arm, claim.measure)
    summary = arm[0].summary
    stale, bias = summary.staleness_mean, summary.length_bias
    return [claim.system, claim.headline, shown(got), f"{stale:.2f}", f"{bias.mean_ratio:.3f}"]


def _document(
    claims: Sequence[Claim], lines: Sequence[Sequence[str]], options: argparse.Namespace
) -> str:
    table = [
        "| system | headline | here | mean staleness | trained / offered length |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(line) + " |" for line in lines),
    ]
    words = [
        f"* **{claim.system}** ({_measured(claim)}; {_arms(claim)}). {claim.word}"
        for claim in claims
    ]
    not_expressed = [f"* **{headline}**: {why}" for headline, why in NOT_EXPRESSED.items()]
    return "\n".join(
        [
            HEAD.format(interval=_interval(options.draws), command=options.command),
            *table,
            "",
            "## Notes on each line",
            "",
            *words,
            "",
            "## What the closed loop cannot say",
            "",
            *not_expressed,
            "",
        ]
    )


def _interval(draws: int) -> str:
    if not draws:
        return "here without intervals, which `make reproduction` adds"
    return (
        f"in brackets is the 95 % interval from {draws} further draws of the workload (prompts of\n"
        "a shipped trace are resampled, synthetic lengths are drawn anew; both arms run on each)"
    )


def _measured(claim: Claim) -> str:
    return {
        "total": "time to train all prompts",
        "rollout": "seconds of rollout per step",
        "tokens": "accepted tokens per second",
        "bubble": "share of the places of a batch that are vacant during the rollout",
    }[claim.measure]


def _arms(claim: Claim) -> str:
    before, after = (Path(arm.policy).stem for arm in (claim.baseline, claim.arm))
    worlds = [Path(arm.scenario).stem for arm in (claim.baseline, claim.arm)]
    where = worlds[0] if worlds[0] == worlds[1] else f"{worlds[0]} and {worlds[1]}"
    return f"`{before}` against `{after}` on {where}"


if __name__ == "__main__":
    main()
