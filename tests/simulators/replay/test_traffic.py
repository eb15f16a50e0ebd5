"""Conversations: who comes when, with what to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.simulators import traces
from rollout_sched.simulators.replay.scenario import Conversation, Traffic, TrafficModel
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn, gather
from tests.helpers import make_trace

TALK = SampleRecord("g", 0, 4, (Turn(3, 10, 2.5), Turn(2)), finish="length", arrival_s=7.0)


class TestConversation:
    def test_goes_from_turn_to_turn(self) -> None:
        client = Conversation("session-3", 7.0, TALK, 5)
        assert (client.session, client.group, client.context_tokens) == ("session-3", "client/g", 5)
        assert (client.present.turns, client.present.finish) == ((Turn(3),), "stop")
        assert client.answered(3) == 2.5
        assert (client.group, client.context_tokens) == ("session-3/1", 5 + 3 + 10)
        assert client.known_tokens == 8
        assert (client.present.turns, client.present.finish) == ((Turn(2),), "length")
        assert client.answered(2) is None

    def test_one_question_needs_no_session(self) -> None:
        assert Conversation("session-0", 0.0, SampleRecord("g", 0, 4, (Turn(3),)), 4).session == ""


class TestDrawn:
    trace = make_trace({f"g{i}": [3 + i, 5 + i] for i in range(20)})

    def arrivals(self, run_seed: int = 0, seed: int = 0) -> list[tuple[float, SampleRecord]]:
        model = TrafficModel(rate=2.0, for_s=500.0, seed=seed)
        drawn = Traffic(model, self.trace, run_seed)
        return [(c.arrival_s, c.sample) for c in drawn.conversations()]

    def test_so_many_a_second_for_so_long_with_any_sample(self) -> None:
        arrivals = self.arrivals()
        assert 900 < len(arrivals) < 1100
        times = [at for at, _ in arrivals]
        assert times == sorted(times)
        assert times[0] > 0
        assert 490 < times[-1] < 500
        assert len({(s.group, s.sample) for _, s in arrivals}) == 40

    def test_by_seed(self) -> None:
        assert self.arrivals() == self.arrivals()
        assert self.arrivals(1) != self.arrivals() != self.arrivals(seed=1)

    def test_another_trace_may_be_named(self, tmp_path: Path) -> None:
        path = tmp_path / "talk.jsonl"
        traces.write(Trace("talk", gather([TALK])), path)
        drawn = Traffic(TrafficModel(rate=1.0, for_s=9.0, trace=str(path)), self.trace, 0)
        assert {c.sample.group for c in drawn.conversations()} == {"g"}


class TestRecorded:
    def test_each_sample_once_when_it_arrived(self) -> None:
        early = SampleRecord("e", 0, 4, (Turn(3),), arrival_s=1.5)
        traffic = Traffic(TrafficModel(), Trace("t", gather([TALK, early])), 0)
        assert [(c.arrival_s, c.name) for c in traffic.conversations()] == [
            (1.5, "session-0"),
            (7.0, "session-1"),
        ]
        assert len(traffic) == 2
        assert len(Traffic(TrafficModel(for_s=7.0), Trace("t", gather([TALK, early])), 0)) == 1

    def test_a_trace_without_arrivals_is_told_what_to_do(self) -> None:
        with pytest.raises(CallerError, match=r"trace t has no arrival times.*set traffic\.rate"):
            Traffic(TrafficModel(), make_trace({"a": [3]}), 0)


class TestNeeds:
    def test_the_longest_request_there_can_be(self) -> None:
        trace = Trace("t", gather([TALK]))
        assert Traffic(TrafficModel(max_tokens=50), trace, 0).most_tokens == 4 + 3 + 10 + 50
        assert Traffic(TrafficModel(max_tokens=2), trace, 0).most_tokens == 4 + 2 + 10 + 2
        assert Traffic(TrafficModel(), trace, 0).max_tokens == 5, "the trace's cap"

    def test_lengths_by_prompt(self) -> None:
        other = SampleRecord("g", 1, 4, (Turn(8),), arrival_s=1.0)
        traffic = Traffic(TrafficModel(), Trace("t", gather([TALK, other])), 0)
        assert traffic.length("client/g") == round((3 + 8) / 2)
        assert traffic.length("session-1/1") == 2
