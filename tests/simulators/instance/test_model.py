"""What a simulated instance cannot be started with."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.simulators.instance.engine import last_token
from rollout_sched.simulators.instance.model import CostModel, SimRequest, Speculation
from rollout_sched.simulators.instance.step_time import StepTime
from tests.simulators.instance.by_hand import H100_7B, instance, request


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kv_blocks": 0}, "kv_blocks"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens"),
        ({"watermark": 1.0}, "watermark"),
    ],
)
def test_settings_that_vllm_refuses_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        instance(**wrong)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"token_s": -1.0}, "token_s"),
        ({"context_s": float("nan")}, "context_s"),
        ({"exponent": 0.5}, "exponent"),
        ({"expert_share": 1.5}, "expert_share"),
        ({"step_s": 0.0, "weights_s": 0.0}, "cannot advance"),
    ],
)
def test_nonsense_is_refused(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CostModel(**{"step_s": 1.0, "weights_s": 1.0, "token_s": 1.0, **wrong})


seconds = st.floats(1e-6, 0.1)
costs = st.builds(
    CostModel,
    step_s=seconds,
    weights_s=st.just(0.0) | seconds,
    token_s=st.just(0.0) | st.floats(1e-9, 1e-3),
    sequence_s=st.just(0.0) | st.floats(1e-9, 1e-4),
    context_s=st.just(0.0) | st.floats(1e-12, 1e-5),
    experts_s=st.just(0.0) | seconds,
    expert_share=st.floats(0, 1),
)
speculations = st.builds(
    Speculation,
    tokens=st.integers(2, 4),
    acceptance=st.floats(0, 1),
    method=st.sampled_from(["draft_model", "ngram"]),
    schedule=st.sampled_from(["always", "auto", ((1, 3, 2), (6, 9, 0))]),
    acceptance_lost_per_version=st.sampled_from([0.0, 0.3, 1.0]),
    draft_update_every=st.integers(0, 3),
)
drafts = st.none() | speculations


def test_a_step_is_the_sum_of_its_parts() -> None:
    cost = CostModel(
        0.5,
        3.0,
        4.0,
        exponent=2.0,
        sequence_s=0.25,
        context_s=0.125,
        attention_s=2.0,
        request_s=0.75,
        prefill_s=0.625,
    )
    time = StepTime(cost)
    decode_s = time.step(sequences=2, tokens=2, context=8, attention=0.0, admitted=0)
    assert decode_s == pytest.approx(0.5 + (3.0**2 + 8.0**2) ** 0.5 + 2 * 0.25 + 8 * 0.125)
    mixed_s = time.step(sequences=2, tokens=3, context=8, attention=3.0, admitted=4)
    matmul_s = (3.0**2 + 12.0**2) ** 0.5
    prefill_s = 3.0 * 2.0 + 4 * 0.75 + 0.625
    assert mixed_s == pytest.approx(0.5 + matmul_s + 2 * 0.25 + 8 * 0.125 + prefill_s)
    verify_s = (3.0**2 + 16.0**2) ** 0.5
    half = StepTime(cost, Speculation(1, 0.5, schedule="always", draft_share=0.1))
    drafts_s = 0.1 * (3.0**2 + 8.0**2) ** 0.5 + 0.3 * 0.5
    token_s = (0.5 + verify_s + 2 * 0.25 + 8 * 0.125 + drafts_s) / 1.5
    assert half.step(2, 2, 8, 0.0, 0) == pytest.approx(token_s)
    more_s = (3.0**2 + 20.0**2) ** 0.5 - verify_s
    assert half.step(2, 3, 8, 3.0, 4) == pytest.approx(token_s + more_s + prefill_s)


def test_a_batch_reads_the_experts_that_its_tokens_take() -> None:
    """Of 4 experts a token takes 2: two tokens take 3 on average, and many take all."""
    cost = CostModel(0.5, 1.0, 0.0, experts_s=4.0, expert_share=0.5)
    for tokens, read in ((1, 2.0), (2, 3.0), (1000, 4.0)):
        seconds = StepTime(cost).step(tokens, tokens, 0, 0.0, 0)
        assert seconds == pytest.approx(0.5 + 1.0 + read)


def test_published_speed_of_a_7b_model_on_an_h100() -> None:
    """150 tokens/s alone, 4,530 with 64 sequences of 4k context (simulated constants)."""
    assert 1 / StepTime(H100_7B).step(1, 1, 100, 0.0, 0) == pytest.approx(150, rel=0.03)
    assert 64 / StepTime(H100_7B).step(64, 64, 64 * 4096, 0.0, 0) == pytest.approx(4530, rel=0.03)


@given(costs, drafts, st.integers(1, 60), st.integers(1, 300), st.integers(0, 10**6))
def test_a_jump_is_the_sum_of_its_steps(
    cost: CostModel, drafts: Speculation | None, steps: int, sequences: int, context: int
) -> None:
    time = StepTime(cost, drafts)
    one_by_one = sum(
        time.step(sequences, sequences, context + i * sequences, 0.0, 0) for i in range(steps)
    )
    assert time.jump(steps, sequences, context) == pytest.approx(one_by_one, rel=1e-12)


@given(costs, drafts, st.integers(0, 200), st.integers(1, 400), st.floats(1.0, 100.0))
def test_a_slow_instance_takes_so_many_times_as_long(
    cost: CostModel, drafts: Speculation | None, sequences: int, prefilled: int, factor: float
) -> None:
    usual, slow = StepTime(cost, drafts), StepTime(cost, drafts)
    slow.step(sequences, sequences + prefilled, 900, 50.0, 3)  # must not be remembered
    slow.slow(factor)
    for tokens, rest in ((sequences, (0.0, 0)), (sequences + prefilled, (50.0, 3))):
        usual_s = usual.step(sequences, tokens, 900, *rest)
        assert slow.step(sequences, tokens, 900, *rest) == pytest.approx(factor * usual_s)
    slow.slow(1.0)
    assert slow.step(sequences, tokens, 900, *rest) == usual.step(sequences, tokens, 900, *rest)


@given(costs, drafts, st.integers(0, 10**6), st.integers(1, 1024), st.integers(0, 10**8))
def test_steps_within_inverts_jump(
    cost: CostModel, drafts: Speculation | None, steps: int, sequences: int, context: int
) -> None:
    time = StepTime(cost, drafts)
    exact = time.jump(steps, sequences, context)
    assert time.steps_within(exact, sequences, context) == steps
    half = (exact + time.jump(steps + 1, sequences, context)) / 2
    assert time.steps_within(half, sequences, context) == steps
    assert time.steps_within(-1.0, sequences, context) == 0


@given(costs, speculations, st.integers(1, 512), st.integers(0, 9))
def test_a_schedule_by_batch_is_never_slower(
    cost: CostModel, drafts: Speculation, sequences: int, version: int
) -> None:
    """Than any fixed number of drafts, or none, at the context for which it chooses."""
    context = drafts.context * sequences

    def seconds(schedule: Any, accepted: float = drafts.acceptance) -> float:
        changed = msgspec.structs.replace(drafts, schedule=schedule, acceptance=accepted)
        time = StepTime(cost, changed)
        time.set_version(version)
        return time.step(sequences, sequences, context, 0.0, 0)

    plain = StepTime(cost).step(sequences, sequences, context, 0.0, 0)
    assert seconds(((1, 1, 0),)) == plain
    fixed = [seconds(((1, 1, count),)) for count in range(drafts.tokens + 1)]
    assert seconds("auto") == min(fixed)
    assert seconds("always") == fixed[-1]
    assert plain <= seconds("always", 0.0)
    least = StepTime(drafts.least_cost(cost)).step(sequences, sequences, context, 0.0, 0)
    assert least <= min(fixed) * (1 + 1e-9)


def test_a_gap_of_a_schedule_has_the_drafts_before_it() -> None:
    drafts = Speculation(4, 0.5, schedule=((1, 3, 4), (6, 9, 2)))
    chosen = [list(drafts.choices(sequences)) for sequences in (1, 3, 5, 6, 9, 100)]
    assert chosen == [[4], [4], [4], [2], [2], [2]]
    assert StepTime(H100_7B, drafts).schedule(10) == ((1, 5, 4), (6, 10, 2))


@given(costs, speculations, st.integers(1, 512))
def test_at_the_break_even_drafts_take_as_long_as_none(
    cost: CostModel, drafts: Speculation, sequences: int
) -> None:
    change = msgspec.structs.replace
    even = StepTime(cost, drafts).break_even(sequences, drafts.tokens)
    always = change(drafts, schedule="always", acceptance=min(1.0, even))
    plain, drafted = (
        StepTime(cost, one).step(sequences, sequences, drafts.context * sequences, 0.0, 0)
        for one in (None, always)
    )
    assert drafted >= plain * 0.999 if even > 1 else drafted == pytest.approx(plain, rel=1e-3)


def test_acceptance_is_lost_by_version_until_the_drafter_is_updated() -> None:
    drafts = Speculation(4, 0.8, acceptance_lost_per_version=0.5, draft_update_every=3)
    assert [drafts.acceptance_of(version) for version in range(5)] == [0.8, 0.4, 0.2, 0.8, 0.4]
    assert msgspec.structs.replace(drafts, draft_update_every=0).acceptance_of(3) == 0.1


def test_no_model_runs_in_an_empty_step() -> None:
    assert StepTime(H100_7B).step(0, 0, 0, 0.0, 0) == H100_7B.step_s


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (request(1, context=0), "context_tokens"),
        (request(1, new=0), "new_tokens"),
        (request(1, max_new_tokens=0), "max_new_tokens"),
        (request(1, shared_tokens=11), "shared_tokens"),
        (request(1, known_tokens=11), "known_tokens"),
        (request(1, context=128), "raise max_model_len"),
        (request(1, context=60, new=30), "23 blocks of 4, but the instance has 20; raise"),
    ],
)
def test_a_request_that_can_never_run_is_refused(wrong: SimRequest, says: str) -> None:
    one = instance(kv_blocks=20, max_model_len=128)
    with pytest.raises(ValueError, match=says):
        one.submit(wrong, 0.0)
    assert one.next_at() == math.inf


@pytest.mark.parametrize(
    ("new", "most", "ends"),
    [
        (5, 9, (15, "stop")),
        (9, 9, (19, "stop")),
        (9, 5, (15, "length")),
        (200, 200, (128, "length")),
    ],
)
def test_a_request_ends_at_its_first_limit(new: int, most: int, ends: tuple[int, str]) -> None:
    one = instance(kv_blocks=50, max_model_len=128)
    asked = request(1, context=10, new=new, max_new_tokens=most)
    assert last_token(asked, one.spec) == ends


def test_an_unknown_pause_mode_is_refused() -> None:
    one = instance()
    with pytest.raises(ValueError, match="keep, abort or wait, got 'drain'"):
        one.pause(0.0, "drain", clear_cache=False)  # type: ignore[arg-type]
