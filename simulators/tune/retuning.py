"""Find better parameters for a running policy: replay its recent past under neighbours of it.

It tries only what `core.tuning` can change during a run, one parameter at a time, and nothing that
the user has bounded (staleness, the bias of a step). The best neighbour is taken if it is faster on
resampled prompts too, by more than the spread, and no more biased than allowed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec

from rollout_sched.config import REGISTRY, PolicyFile
from rollout_sched.core import TUNABLE_ROLES, Parameters
from rollout_sched.core.model.errors import RolloutError
from rollout_sched.simulators.replay import Ratio, Scenario, ratio_of
from rollout_sched.simulators.replay.runs import Run, replay, replay_resampled
from rollout_sched.simulators.traces.model import Trace
from rollout_sched.simulators.tune.evaluation import HardLimits, bench_of, figures, together
from rollout_sched.simulators.tune.space import SPACE, Setting

SEEDS = 3
RESAMPLES = 8

#: Niceness of the replaying process: the live fleet has priority.
_NICE = 15


class Question(msgspec.Struct, frozen=True):
    """What to retune: `policy` with `told` made the samples of `trace`; `scenario` is the fleet,
    with the job as it is trained."""

    policy: PolicyFile
    told: Parameters
    trace: Trace
    scenario: Scenario
    limits: HardLimits


class Better(msgspec.Struct, frozen=True):
    """Better parameters, and their speed-up over the running ones, on resampled prompts."""

    parameters: Parameters
    ratio: Ratio


def better(question: Question) -> Better | None:
    """The better parameters; None if nothing is better by more than the spread. Runs in its own
    process.

    Raises RolloutError if the running policy cannot be replayed on that fleet.
    """
    os.nice(_NICE)
    setting = bench_of(question.trace, question.scenario, seed=0).setting(
        question.limits.max_staleness
    )
    present = with_parameters(question.policy, question.told)
    before = _runs(question, present)
    best: tuple[float, Parameters] | None = None
    for parameters in neighbours(present, setting):
        runs = _attempt(question, with_parameters(present, parameters))
        if runs is None or question.limits.exceeded(together([figures(run) for run in runs])):
            continue
        speed = ratio_of(_speed, runs, before).value
        if best is None or speed > best[0]:
            best = speed, parameters
    if best is None or best[0] <= 1:
        return None
    ratio = _confirmed(question, present, with_parameters(present, best[1]))
    return Better(best[1], ratio) if ratio.low is not None and ratio.low > 1 else None


def neighbours(policy: PolicyFile, setting: Setting) -> Iterator[Parameters]:
    """Each parameter that may change in a run, at the values of `SPACE` next to its current one."""
    for role in TUNABLE_ROLES:
        cls, given = policy.roles[role]
        for name, values in _values(role, cls, setting).items():
            if name not in cls.tunable:
                continue
            own = given.get(name, _default(cls, name))
            others = sorted({value for value in values if value != own})
            below = [value for value in others if value < own][-1:]
            above = [value for value in others if value > own][:1]
            for value in (*below, *above):
                yield {role: {name: value}}


def with_parameters(policy: PolicyFile, parameters: Parameters) -> PolicyFile:
    roles = dict(policy.roles)
    for role, values in parameters.items():
        cls, given = roles[role]
        roles[role] = (cls, {**given, **values})
    return msgspec.structs.replace(policy, roles=roles)


def _values(role: str, cls: type, setting: Setting) -> dict[str, list[Any]]:
    """The values of each parameter; none for a policy of the user's own, which `SPACE` lacks."""
    use = next((name for name, known in REGISTRY[role].items() if known is cls), None)
    option = next((option for option in SPACE[role] if option.use == use), None)
    return {} if option is None else option.keys(setting)


def _default(cls: type[msgspec.Struct], name: str) -> Any:
    return next(f.default for f in msgspec.structs.fields(cls) if f.name == name)


def _runs(question: Question, policy: PolicyFile) -> list[Run]:
    (runs,) = replay(question.trace, [policy], question.scenario, seeds=SEEDS)
    return runs


def _attempt(question: Question, policy: PolicyFile) -> list[Run] | None:
    """The runs; None if the policy refuses its parameters, or its run does not end."""
    try:
        return _runs(question, policy)
    except RolloutError:
        return None


def _confirmed(question: Question, present: PolicyFile, other: PolicyFile) -> Ratio:
    pair = [present, other]
    before, after = replay(question.trace, pair, question.scenario, seeds=SEEDS)
    drawn_before, drawn_after = replay_resampled(
        question.trace, pair, question.scenario, resamples=RESAMPLES
    )
    return ratio_of(_speed, after, before, drawn_after, drawn_before)


def _speed(run: Run) -> float:
    return run.summary.equal_length_tokens_per_s
