"""Runs many seeds in several processes, and reports and shrinks failing ones."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from random import Random

import msgspec

from benchmarks.soak.hostile import ATTACKS
from rollout_sched.core.model.records import ONE_IN
from tests.simulation.clients import REFUSED
from tests.simulation.plan import EVERYTHING, Plan, draw
from tests.simulation.world import Outcome, run

#: One seed in so many runs twice; both runs must be identical.
TWICE = 10

#: One seed in so many runs without faults, once with and once without hostile clients whose calls
#: are refused; and as many with hostile clients of any kind.
BLAMED = 10

#: Seconds by which twenty hostile clients may lengthen the longest call.
DELAY_S = 10.0

#: Seeds per process, so that no process grows large.
PORTION = 25

#: Most runs for shrinking a failing plan.
SHRINKING_RUNS = 40


def check(seed: int) -> Outcome:
    """Run a seed. Some seeds run twice, with identical results, or with hostile clients, which must
    not affect others."""
    if seed % BLAMED == 1:
        return blame(draw(seed))
    if seed % BLAMED == 2 and seed >= EVERYTHING:
        return delay(draw(seed))
    outcome = run(draw(seed))
    if not outcome.broken and seed % TWICE == 0:
        again = run(draw(seed))
        if again.journal != outcome.journal:
            return msgspec.structs.replace(
                outcome, broken="the same seed is the same run: the journals differ"
            )
    return outcome


def blame(plan: Plan) -> Outcome:
    """Check that hostile clients whose calls are refused change no answers and no waiting times."""
    alone, beside = _hostile(plan, REFUSED)
    if not beside.broken and (beside.calls, beside.work) != (alone.calls, alone.work):
        law = "one client's input never changes another's answer or latency"
        return msgspec.structs.replace(beside, broken=law)
    return beside


def delay(plan: Plan) -> Outcome:
    """Check that hostile clients of any kind do not delay others for long: they may change the
    order of the waiting requests, but the longest wait only a little."""
    alone, beside = _hostile(plan, tuple(ATTACKS), floods=True)
    longest_s = max((took_s for took_s, *_ in alone.calls), default=0.0)
    late = [
        (number, took_s)
        for number, (took_s, *_) in enumerate(beside.calls)
        if took_s > longest_s + DELAY_S
    ]
    if not beside.broken and late:
        law = f"no call waits long because of others, {longest_s} s without: {late}"
        return msgspec.structs.replace(beside, broken=law)
    return beside


def _hostile(plan: Plan, kinds: Sequence[str], *, floods: bool = False) -> tuple[Outcome, Outcome]:
    """The runs of a plan without faults, without and with hostile clients. If the first breaks a
    law, it is returned for both."""
    calm = msgspec.structs.replace(
        plan, faults=[], calls=15, attacks=[], flood=None, in_process=False, tools=None
    )
    rng = Random(f"blame/{plan.seed}")
    times = (rng.uniform(0, plan.horizon_s) for _ in range(20))
    attacks = sorted((at_s, rng.choice(kinds)) for at_s in times)
    # In a fleet of fewer slots none is kept for whoever asks for little.
    floods = floods and plan.instances * plan.slots >= ONE_IN
    flood = (rng.uniform(0, plan.horizon_s), 50) if floods else None
    alone = run(calm)
    if alone.broken:
        return alone, alone
    return alone, run(msgspec.structs.replace(calm, attacks=attacks, flood=flood))


def check_all(
    seeds: Iterable[int], jobs: int, seconds: float | None
) -> Iterator[tuple[int, Outcome]]:
    """Each seed with its outcome, in the order of `seeds`; none starts after `seconds` seconds."""
    end = None if seconds is None else time.monotonic() + seconds
    rest = iter(seeds)
    while portion := list(islice(rest, PORTION * jobs)):
        with ProcessPoolExecutor(jobs, initializer=_spare_the_collector) as pool:
            asked = [(seed, pool.submit(_check_until, seed, end)) for seed in portion]
            for seed, outcome in asked:
                found = outcome.result()
                if found is not None:
                    yield seed, found
        if end is not None and time.monotonic() > end:
            return


def _spare_the_collector() -> None:
    """Exclude imported modules from the garbage collections of each run."""
    gc.collect()
    gc.freeze()


def _check_until(seed: int, end: float | None) -> Outcome | None:
    if end is not None and time.monotonic() > end:
        return None
    return check(seed)


def shrunk(plan: Plan) -> Outcome:
    """A plan that breaks the law, without unneeded faults, attacks and calls."""
    best = run(plan)
    for _ in range(SHRINKING_RUNS):
        outcomes = map(run, _smaller(best.plan))
        smaller = next((o for o in outcomes if o.broken and o.law == best.law), None)
        if smaller is None:
            return best
        best = smaller
    return best


def _smaller(plan: Plan) -> Iterator[Plan]:
    for at in range(len(plan.faults)):
        yield msgspec.structs.replace(plan, faults=plan.faults[:at] + plan.faults[at + 1 :])
    if plan.flood is not None:
        yield msgspec.structs.replace(plan, flood=None)
    if plan.attacks:
        yield msgspec.structs.replace(plan, attacks=[])
    if plan.calls:
        yield msgspec.structs.replace(plan, calls=0, attacks=[])
    if plan.rewards is not None:
        yield msgspec.structs.replace(plan, rewards=None)
    if plan.tools is not None:
        yield msgspec.structs.replace(plan, tools=None)
    for role in plan.overrides:
        rest = {other: keys for other, keys in plan.overrides.items() if other != role}
        yield msgspec.structs.replace(plan, overrides=rest)


def told(outcome: Outcome) -> str:
    """A description of a failed run for people."""
    plan = outcome.plan
    lines = [f"seed {plan.seed}: {outcome.broken}", "", *plan.told(), "", *outcome.told]
    return "\n".join([*lines, f"again: python -m tests.simulation {plan.seed}"])
