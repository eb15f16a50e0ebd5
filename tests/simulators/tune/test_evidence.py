"""The evidence: a policy file that can be read back, and says where it comes from."""

from __future__ import annotations

import re
import tomllib
from functools import cache

from rollout_sched.config import parse_policy
from rollout_sched.simulators.tune import HardLimits, Plan, TuningResult, command, policy_file, tune
from tests.simulators.tune.bench import Oracle, faster_with_more_prompts, small_bench

LIMITS = HardLimits(max_staleness=0, max_length_bias=0.01, max_step_bias=0.051)
BENCH = small_bench()
PLAN = Plan(steps=24, evaluations=300, held_out_seeds=2)


@cache
def tuned(**plan: int) -> TuningResult:
    oracle = Oracle(faster_with_more_prompts, **plan)
    return tune(BENCH, LIMITS, PLAN, oracle, clock=oracle.clock)


def text(result: TuningResult) -> str:
    return command.document(result, BENCH, LIMITS, PLAN, "rollout-sched tune ...")


def test_the_file_is_the_winner() -> None:
    result = tuned()
    table = tomllib.loads(text(result))
    assert tomllib.loads(policy_file(result, BENCH)) == table
    policy = parse_policy("tuned", table)
    assert policy.build() == result.winner.policy().build()
    assert "1.50x [1.50, 1.50] times round_robin_sync on held-out" in policy.about
    assert policy.source == "rollout-sched tune"


def test_the_head_says_what_was_done_and_found() -> None:
    result = tuned()
    head = [line for line in text(result).splitlines() if line.startswith("#")]
    assert head[0] == "# rollout-sched tune ..."
    said = "\n".join(head)
    assert "12 prompts to search, 6 others held out" in said
    assert "300 evaluations of 8, 16, 24 steps" in said
    assert "staleness 0, length bias 0.01, step bias 0.051" in said
    assert "seeds 1001, 1002" in said
    assert "1.50x [1.50, 1.50] of round_robin_sync; " in " ".join(said.replace("\n#", "").split())
    [first, *_] = re.findall(
        r"^# (sync over_prompts=1\.5.* \(the winner\)\n# ) +1\.50x 1\.50-", said, re.M
    )
    assert said.index(first) < said.index("\n# round_robin_sync "), "the winner is the first"
    assert head[2].startswith("# The winner: sync over_prompts=1.5")
    assert not re.search(r"20\d\d-\d\d", said)


def test_equal_results_are_equal_files() -> None:
    assert text(tuned()) == text(tuned.__wrapped__())


def test_the_frontier_shows_what_more_would_bring() -> None:
    said = text(tuned())
    frontier = " ".join(said[said.index("Pareto frontier") :].replace("\n#", "").split())
    assert re.search(r"sync over_prompts=2.* \(step bias 0\.100 above 0\.051\)", frontier)
    assert "round_robin_sync" in frontier


def test_without_validation_that_is_said() -> None:
    said = text(tuned(stop_after=60))
    assert "Finalists: " in said
    assert "steps of the search's prompts" in said
    assert "on the prompts searched on" in tomllib.loads(said)["about"]


def test_a_trace_that_was_not_split_is_said() -> None:
    result = tuned()
    facts = command.facts(result, small_bench(prompts=9), LIMITS, PLAN)
    assert "9 prompts, too few to hold some out" in facts[0]
