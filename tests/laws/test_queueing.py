"""Queueing theory: compares the loop, as an M/M/c queue, with Erlang C and Little's law.

There are c instances of one slot each; every step takes one millisecond, whatever the context, so
an attempt of n tokens takes n ms. Prompts arrive in a Poisson process, each for one sample of
exponential length; slots admission keeps the queue in the scheduler, first come first served. All
prompts form one batch, so no weight update disturbs them.

Waits are correlated, so a run short enough for a test is 10-20 % off Erlang C by chance alone.
Therefore three comparisons: the loop with the exact recursion for the same arrivals, customer by
customer; the recursion with Erlang C over many more customers; the loop with Erlang C, loosely.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

import msgspec
import pytest

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.simulators.instance.model import CostModel
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn, gather
from tests.helpers import Watched, make_policy, make_scenario, watch

PROMPTS = 5000
MEAN_TOKENS = 1000
STEP_S = 1e-3
SERVICE_S = MEAN_TOKENS * STEP_S

POLICY = make_policy("queue", batching="fully_async", freshness="unbounded")

Customer = tuple[float, int]


def erlang_c(servers: int, load: float) -> float:
    """The probability that an arrival must wait, `load` = arrival rate x service time < servers."""
    last = load**servers / math.factorial(servers) / (1 - load / servers)
    return last / (sum(load**k / math.factorial(k) for k in range(servers)) + last)


def mean_wait_s(servers: int, load: float) -> float:
    return erlang_c(servers, load) * SERVICE_S / (servers - load)


def customers(count: int, load: float, seed: int) -> Iterator[Customer]:
    """(arrival, tokens): Poisson arrivals, exponential lengths in whole tokens."""
    rng, now = random.Random(seed), 0.0
    for _ in range(count):
        now += rng.expovariate(load / SERVICE_S)
        yield now, max(1, round(rng.expovariate(1 / MEAN_TOKENS)))


def exact_waits(servers: int, queue: Iterable[Customer]) -> Iterator[float]:
    """First come first served: each customer takes the server that becomes free first."""
    free_at = [0.0] * servers
    heapify(free_at)
    for arrival, tokens in queue:
        begins = max(arrival, heappop(free_at))
        heappush(free_at, begins + tokens * STEP_S)
        yield begins - arrival


def simulate(servers: int, queue: Iterable[Customer]) -> Watched:
    samples = [SampleRecord(f"{i}", 0, 1, (Turn(n),), at) for i, (at, n) in enumerate(queue)]
    scenario = make_scenario(
        instances=servers, slots=1, kv_tokens=10**6, train_s=0.0, prompts_per_step=PROMPTS
    )
    cost = CostModel(step_s=STEP_S, weights_s=0.0, token_s=0.0)
    scenario = msgspec.structs.replace(scenario, cost=cost)
    return watch(POLICY, Trace("queue", gather(samples)), scenario, check=False)


@pytest.fixture(scope="module", params=[(1, 0.5), (3, 1.8)], ids=str)
def run(request: pytest.FixtureRequest) -> tuple[int, float, Watched]:
    servers, load = request.param
    return servers, load, simulate(servers, customers(PROMPTS, load, seed=1))


def waits_of(ran: Watched) -> list[float]:
    arrived = {event.group: now for now, event in ran.said(ev.GroupSubmitted)}
    return [now - arrived[action.request[:-2]] for now, action in ran.said(act.Dispatch)]


def test_erlang_c_of_the_text_books() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 8.0) == pytest.approx(0.409, abs=5e-4)


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (3, 1.8), (8, 6.0)])
def test_the_recursion_meets_erlang_c(servers: int, load: float) -> None:
    count = 400_000
    waits = list(exact_waits(servers, customers(count, load, seed=1)))
    assert sum(waits) / count == pytest.approx(mean_wait_s(servers, load), rel=0.05)
    assert sum(wait > 0 for wait in waits) / count == pytest.approx(
        erlang_c(servers, load), rel=0.02
    )


def test_every_wait_is_the_recursion_s(run: tuple[int, float, Watched]) -> None:
    servers, load, ran = run
    exact = list(exact_waits(servers, customers(PROMPTS, load, seed=1)))
    assert waits_of(ran) == pytest.approx(exact, abs=1e-6)


def test_mean_wait_is_erlang_s_within_20_percent(run: tuple[int, float, Watched]) -> None:
    servers, load, ran = run
    waits = waits_of(ran)
    assert len(waits) == PROMPTS
    assert sum(waits) / PROMPTS == pytest.approx(mean_wait_s(servers, load), rel=0.2)


def test_little_s_law(run: tuple[int, float, Watched]) -> None:
    """The requests in the system, averaged over time, are arrival rate x mean stay."""
    _, load, ran = run
    arrived: dict[str, float] = {}
    stayed_s = area = last = 0.0
    inside = 0
    for now, event, _ in ran.log:
        area += inside * (now - last)
        last = now
        if isinstance(event, ev.GroupSubmitted):
            arrived[event.group] = now
            inside += 1
        elif isinstance(event, ev.RequestFinished):
            stayed_s += now - arrived[event.request[:-2]]
            inside -= 1
    assert inside == 0
    rate, mean_stay_s = PROMPTS / last, stayed_s / PROMPTS
    assert area / last == pytest.approx(rate * mean_stay_s)
    assert rate == pytest.approx(load / SERVICE_S, rel=0.05)
    assert mean_stay_s == pytest.approx(sum(waits_of(ran)) / PROMPTS + SERVICE_S, rel=0.05)


def test_little_s_law_of_the_servers(run: tuple[int, float, Watched]) -> None:
    """The requests in service, averaged over time, are the offered load; never more than c."""
    servers, load, ran = run
    busy = last = 0.0
    in_flight = 0
    for now, event, actions in ran.log:
        busy += in_flight * (now - last)
        last = now
        in_flight += sum(isinstance(action, act.Dispatch) for action in actions)
        in_flight -= isinstance(event, ev.RequestFinished)
        assert in_flight <= servers
    assert busy / last == pytest.approx(load, rel=0.05)
