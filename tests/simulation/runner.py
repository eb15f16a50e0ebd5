"""Many seeds, one after the other in some processes; and what is to be said of one that fails."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from random import Random

import msgspec

from benchmarks.soak.hostile import ATTACKS
from tests.simulation.clients import REFUSED
from tests.simulation.plan import EVERYTHING, Plan, draw
from tests.simulation.world import Outcome, run

#: One seed in so many is run twice, and each time as before.
TWICE = 10

#: One in so many is run without faults, once with hostile clients whose calls are refused and once
#: without; and as many with any.
BLAMED = 10

#: Seconds that the longest call may take longer for twenty hostile clients.
DELAY_S = 10.0

#: Seeds for a process, so that none grows old.
PORTION = 25

#: Runs in which a failing plan may be made smaller.
SHRINKING_RUNS = 40


def check(seed: int) -> Outcome:
    """The run of a seed; now and then twice, which must be the same, or beside hostile clients, who
    must not matter."""
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
    """That hostile clients whose calls are refused change nobody's answer, and make nobody wait."""
    alone, beside = _hostile(plan, REFUSED)
    if not beside.broken and (beside.calls, beside.work) != (alone.calls, alone.work):
        law = "one client's input never changes another's answer or its latency"
        return msgspec.structs.replace(beside, broken=law)
    return beside


def delay(plan: Plan) -> Outcome:
    """That others are answered beside hostile clients of any kind, and before long: which of those
    who wait for the fleet is first may change, but not by much how long one may wait."""
    alone, beside = _hostile(plan, tuple(ATTACKS))
    longest_s = max((took_s for took_s, *_ in alone.calls), default=0.0)
    late = [
        (number, took_s)
        for number, (took_s, *_) in enumerate(beside.calls)
        if took_s > longest_s + DELAY_S
    ]
    if not beside.broken and late:
        law = f"nobody waits for long because of others, {longest_s} s without: {late}"
        return msgspec.structs.replace(beside, broken=law)
    return beside


def _hostile(plan: Plan, kinds: Sequence[str]) -> tuple[Outcome, Outcome]:
    """The run of a plan without faults, alone and beside hostile clients; one that is broken is
    both."""
    calm = msgspec.structs.replace(
        plan, faults=[], calls=15, attacks=[], in_process=False, tools=None
    )
    dice = Random(f"blame/{plan.seed}")
    times = (dice.uniform(0, plan.horizon_s) for _ in range(20))
    attacks = sorted((at_s, dice.choice(kinds)) for at_s in times)
    alone = run(calm)
    if alone.broken:
        return alone, alone
    return alone, run(msgspec.structs.replace(calm, attacks=attacks))


def check_all(
    seeds: Iterable[int], jobs: int, seconds: float | None
) -> Iterator[tuple[int, Outcome]]:
    """Each with its outcome, as they come; none is begun after so many seconds."""
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
    """Each run looks for what it has left, and not at all that was imported."""
    gc.collect()
    gc.freeze()


def _check_until(seed: int, end: float | None) -> Outcome | None:
    if end is not None and time.monotonic() > end:
        return None
    return check(seed)


def shrunk(plan: Plan) -> Outcome:
    """A plan that breaks a law, without the faults, attacks and calls that it does not need."""
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
    """A run that failed, for people."""
    plan = outcome.plan
    lines = [f"seed {plan.seed}: {outcome.broken}", "", *plan.told(), "", *outcome.told]
    return "\n".join([*lines, f"again: python -m tests.simulation {plan.seed}"])
