"""Tuning as a whole: it keeps its budget, survives interruption, and breaks no limit."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.simulators.tune import HardLimits, Plan, TuningResult, tune
from rollout_sched.simulators.tune.evaluation import CaseFigures, Task
from rollout_sched.simulators.tune.search import EXHAUSTED, INTERRUPTED, SPENT, Timekeeper
from rollout_sched.workers import WorkerDied
from tests.simulators.tune.bench import Oracle, faster_with_more_prompts, small_bench

LIMITS = HardLimits(max_staleness=0, max_length_bias=0.01, max_step_bias=0.051)
BENCH = small_bench()


def tuned(oracle: Oracle, limits: HardLimits = LIMITS, **plan: float) -> TuningResult:
    usual = {"steps": 24, "evaluations": 300, "held_out_seeds": 3}
    return tune(BENCH, limits, Plan(**{**usual, **plan}), oracle, clock=oracle.clock)


def test_the_winner_is_the_fastest_allowed_on_what_was_held_out() -> None:
    oracle = Oracle(faster_with_more_prompts)
    result = tuned(oracle)
    batching = result.winner.table["batching"]
    assert (batching["use"], batching["over_prompts"]) == ("sync", 1.5)
    assert result.ended == SPENT
    assert result.evaluations == 300
    validation = oracle.tasks[300:]
    assert {(task.case.seed, task.case.held_out) for task in validation} == {
        (seed, True) for seed in (1001, 1002, 1003)
    }
    assert len(validation) == 3 * len(result.finalists.candidates)
    assert result.finalists.held_out
    assert {"round_robin_sync", "dplb"} <= {one.preset for one in result.finalists.candidates}


def test_equal_plans_give_equal_results() -> None:
    one, other = (tuned(Oracle(faster_with_more_prompts), seed=7) for _ in range(2))
    assert one.winner == other.winner
    assert [c.key for c in one.finalists.candidates] == [c.key for c in other.finalists.candidates]
    assert [c.key for c in one.searched.candidates] == [c.key for c in other.searched.candidates]


def test_a_lucky_candidate_does_not_win() -> None:
    def lucky(task: Task) -> CaseFigures:
        figures = faster_with_more_prompts(task)
        if task.table.get("ordering", {}).get("use") == "longest_first" and not task.case.held_out:
            return CaseFigures(tokens_per_s=10 * figures.tokens_per_s)
        return figures

    result = tuned(Oracle(lucky))
    best_searched = max(
        result.searched.candidates, key=lambda one: result.searched.figures(one).tokens_per_s
    )
    assert best_searched.table["ordering"]["use"] == "longest_first"
    held_out = result.finalists
    assert all(
        held_out.speed_up(one, result.winner).low <= 1.0
        for one in held_out.candidates
        if not LIMITS.exceeded(held_out.figures(one))
    )


def test_a_candidate_above_a_limit_on_held_out_data_does_not_win() -> None:
    def sly(task: Task) -> CaseFigures:
        figures = faster_with_more_prompts(task)
        biased = figures.step_bias > 0 and task.case.held_out
        return CaseFigures(
            tokens_per_s=figures.tokens_per_s, step_bias=1.0 if biased else figures.step_bias
        )

    result = tuned(Oracle(sly))
    assert LIMITS.exceeded(result.finalists.figures(result.winner)) == []
    assert result.winner.table.get("batching", {}).get("over_prompts", 1.0) == 1.0


def test_a_finalist_keeps_the_limits_with_something_to_spare() -> None:
    def more_biased_when_held_out(task: Task) -> CaseFigures:
        figures = faster_with_more_prompts(task)
        bias = figures.step_bias * (1.05 if task.case.held_out else 1.0)
        return msgspec.structs.replace(figures, step_bias=bias)

    limits = HardLimits(max_staleness=0, max_length_bias=0.01, max_step_bias=0.05)
    result = tuned(Oracle(more_biased_when_held_out), limits)
    batching = result.winner.table["batching"]
    assert (batching["use"], batching["over_prompts"]) == ("sync", 1.375)


class TestBudget:
    @pytest.mark.parametrize("seconds", [60.0, 400.0])
    def test_time_is_kept_and_what_is_left_validates(self, seconds: float) -> None:
        oracle = Oracle(faster_with_more_prompts)
        result = tuned(oracle, evaluations=None, seconds=seconds)
        assert oracle.now <= seconds
        assert oracle.now > 0.6 * seconds
        assert result.ended == SPENT
        assert result.finalists.held_out

    def test_too_little_time_for_all_seeds_validates_on_fewer(self) -> None:
        result = tuned(Oracle(faster_with_more_prompts), evaluations=None, seconds=20.0)
        assert 1 <= len(result.finalists.cases) < 3

    def test_too_little_time_for_any_validates_on_none(self) -> None:
        result = tuned(Oracle(faster_with_more_prompts), evaluations=None, seconds=6.0)
        assert not result.finalists.held_out
        assert LIMITS.exceeded(result.finalists.figures(result.winner)) == []

    def test_no_time_at_all_says_what_to_do(self) -> None:
        with pytest.raises(CallerError, match="increase --budget"):
            tuned(Oracle(faster_with_more_prompts), evaluations=None, seconds=0.0)

    def test_no_validation_where_none_is_wanted(self) -> None:
        result = tuned(Oracle(faster_with_more_prompts), held_out_seeds=0)
        assert not result.finalists.held_out

    def test_the_validations_share_is_known_from_what_steps_took(self) -> None:
        now = [0.0]
        keeper = Timekeeper(100.0, lambda: now[0])
        assert keeper.left_s(0) == 100.0
        assert keeper.left_s(10) == 65.0
        now[0] = 20.0
        keeper.note(200)
        assert keeper.left_s(10) == pytest.approx(80 - 1.15)
        assert keeper.left_s(10**6) == 80 - 35
        assert Timekeeper(None, lambda: 5.0).left_s(3) == float("inf")


class TestInterruption:
    @pytest.mark.parametrize("after", [3, 50, 150])
    def test_the_best_so_far_is_kept_and_nothing_validated(self, after: int) -> None:
        oracle = Oracle(faster_with_more_prompts, stop_after=after)
        result = tuned(oracle)
        assert result.ended == INTERRUPTED
        assert result.evaluations == len(oracle.tasks) == after
        assert not result.finalists.held_out
        assert LIMITS.exceeded(result.finalists.figures(result.winner)) == []

    def test_in_the_validation_whole_seeds_are_kept(self) -> None:
        whole = tuned(Oracle(faster_with_more_prompts))
        finalists = len(whole.finalists.candidates)
        result = tuned(Oracle(faster_with_more_prompts, stop_after=300 + finalists + 3))
        assert [case.seed for case in result.finalists.cases] == [1001]

    def test_a_worker_that_died_ends_the_search_but_not_the_validation(self) -> None:
        died = WorkerDied("no memory")
        result = tuned(Oracle(faster_with_more_prompts, stop_after=60, error=died))
        assert result.ended == "no memory"
        assert result.finalists.held_out


def test_an_exhausted_space_is_no_endless_search(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_sched.simulators.tune import space

    plain = {role: of_role[:1] for role, of_role in space.SPACE.items()}
    monkeypatch.setattr(space, "SPACE", plain)
    result = tuned(Oracle(faster_with_more_prompts), evaluations=None)
    assert result.ended == EXHAUSTED


def test_the_nearest_candidate_is_named_if_none_keeps_the_limits() -> None:
    def biased(task: Task) -> CaseFigures:
        return CaseFigures(tokens_per_s=1.0, step_bias=0.3)

    with pytest.raises(CallerError, match=r"the nearest is .*: step bias 0\.300 above 0\.051"):
        tuned(Oracle(biased))
