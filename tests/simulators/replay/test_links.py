"""Links that take their time: what is said arrives later, in order, and nothing is lost by it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollout_sched.config import ConfigError
from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.links import Links, SimLinks
from rollout_sched.simulators.replay.scenario import Scenario, parse_scenario
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn, gather
from tests.helpers import make_policy, make_scenario, make_trace, watch

SYNC = make_policy("sync", weights={"when": "between_batches"})
EVEN = Links(fronts=1, delay_s=0.25, spread=0.0)


def with_links(links: Links | None, **other: Any) -> Scenario:
    return msgspec.structs.replace(make_scenario(**other), links=links)


def test_an_order_and_its_answer_take_a_message_each() -> None:
    trace = make_trace({"a": [4], "b": [3]})
    plain = watch(SYNC, trace, with_links(None, slots=1))
    ran = watch(SYNC, trace, with_links(EVEN, slots=1))
    assert [at for at, _ in plain.said(ev.RequestFinished)] == [4.0, 19.0]
    assert [at for at, _ in ran.said(ev.RequestFinished)] == [4.5, 20.0]
    assert not ran.scheduler.state.anomalies


def test_answers_are_written_one_after_the_other() -> None:
    """Two that come at once, and one a second later, which finds the front at work."""
    writing = Links(fronts=1, delay_s=0.0, spread=0.0, token_s=0.5)
    ran = watch(SYNC, make_trace({"a": [4, 4, 5]}), with_links(writing, slots=3))
    assert [at for at, _ in ran.said(ev.RequestFinished)] == [6.0, 8.0, 10.5]
    assert not ran.scheduler.state.anomalies


def test_a_link_without_delay_changes_nothing() -> None:
    trace = make_trace({"a": [4, 7], "b": [3, 5], "c": [9, 2]})
    plain = watch("areal", trace, with_links(None, slots=2, prompts_per_step=2))
    ran = watch("areal", trace, with_links(Links(4, 0.0), slots=2, prompts_per_step=2))
    assert ran.total_s == plain.total_s
    assert ran.deliveries == plain.deliveries


@pytest.mark.parametrize("policy", ["areal", "tail_batching", "partial_rollout", "dplb"])
def test_every_policy_comes_to_its_end(policy: str) -> None:
    trace = make_trace({f"g{n}": [3 + n, 9 - n] for n in range(6)})
    links = Links(fronts=3, delay_s=0.3, spread=1.0)
    ran = watch(policy, trace, with_links(links, slots=2, instances=2, prompts_per_step=2))
    assert sorted(group for _, groups in ran.deliveries for group in groups) == sorted(
        f"g{n}" for n in range(6)
    )
    assert not ran.scheduler.state.anomalies


def test_a_tool_begins_when_its_turn_is_known_to_be_over() -> None:
    samples = [SampleRecord("g", 0, 4, (Turn(2, 1, 3.0), Turn(2)))]
    ran = watch(SYNC, Trace("t", gather(samples)), with_links(EVEN))
    ((turn_at, _),) = ran.said(ev.TurnFinished)
    ((back_at, _),) = ran.said(ev.ToolReturned)
    assert turn_at == 2.5
    assert back_at == turn_at + EVEN.delay_s + 3.0 + EVEN.delay_s


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_a_tool_begins_no_earlier_where_the_front_writes_slowly(spread: float) -> None:
    """Else its result is not wanted yet, and nothing comes after it."""
    samples = [SampleRecord(f"g{n}", 0, 4, (Turn(4, 1, 0.0), Turn(2))) for n in range(6)]
    writing = Links(fronts=1, delay_s=0.1, spread=spread, token_s=0.5)
    ran = watch(SYNC, Trace("t", gather(samples)), with_links(writing, slots=6))
    assert len(ran.said(ev.ToolReturned)) == 6
    assert not ran.scheduler.state.anomalies


def test_each_front_keeps_its_order_and_a_pause_waits_for_all() -> None:
    queue, told = EventQueue(), list[Any]()
    links = SimLinks(Links(2, 1.0, 1.0), 0, queue, lambda event: told.append((queue.now, event)))
    events = [ev.TokensArrived(f"g{n % 3}/0", n, n) for n in range(20)]
    for event in events:
        links.tell(event)
    links.tell(ev.InstancePaused("i0"))
    links.tell(ev.WeightsUpdated("i0", 1))
    assert told == [(0.0, ev.WeightsUpdated("i0", 1))]
    while len(queue):
        queue.step()
    assert told[-1][1] == ev.InstancePaused("i0")
    for group in range(3):
        of_group = [event.tokens for _, event in told[1:-1] if event.request == f"g{group}/0"]
        assert of_group == sorted(of_group)
    assert len(told) == 22


def test_orders_wait_too() -> None:
    queue, done = EventQueue(), list[Any]()
    links = SimLinks(EVEN, 0, queue, lambda event: None)
    links.down(done.append)(act.Interrupt("g/0", 1, "i0"))
    assert done == []
    queue.step()
    assert queue.now == 0.25
    assert len(done) == 1


def test_unsupported_scenarios_with_links_are_refused() -> None:
    table: dict[str, Any] = {
        "fleet": {"instances": 1, "kv_tokens": 100},
        "cost": {"step_s": 1.0, "weights_s": 0.0, "token_s": 0.0},
        "links": {"fronts": 2, "delay_s": 0.01},
    }
    links = parse_scenario("s", table).links
    assert links.fronts == 2
    with pytest.raises(ConfigError, match="links"):
        parse_scenario("s", {**table, "faults": [{"what": "lost", "at_s": 1.0, "instance": 0}]})
