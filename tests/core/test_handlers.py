"""Events are applied by who says them; what follows is in test_scheduler and the laws."""

from __future__ import annotations

import pytest

from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Discard, Release
from rollout_sched.core.model.events import (
    Event,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    RequestSubmitted,
    SubmissionsClosed,
    TokensArrived,
    Woke,
)
from tests.core.told import BIG, LIMIT, PROMPT, Told


@pytest.mark.parametrize(
    ("event", "asks"),
    [
        (ev.BatchRequested(), True),
        (SubmissionsClosed(), True),
        (ev.GroupSubmitted("a", 1, PROMPT, LIMIT), True),
        (InstanceJoined("i1", 8, BIG), True),
        (InstanceLost("i0"), True),
        (ev.WeightsPublished(1), True),
        (RequestSubmitted("d", "", PROMPT, LIMIT), False),
        (TokensArrived("d0", 1, 3), False),
        (InstanceReported("i0", 1, 0, 0.5), False),
        (Woke(), False),
    ],
)
def test_only_some_make_the_group_level_roles_look_again(event: Event, asks: bool) -> None:
    told = Told()
    told(RequestSubmitted("d0", "", PROMPT, LIMIT))
    assert not told.scheduler.state.progress.must_decide
    told.scheduler._apply[type(event)](event, 0.0)
    assert told.scheduler.state.progress.must_decide is asks


def test_the_last_report_stays_with_its_instance() -> None:
    told = Told()
    assert told.instance("i0").report is None
    report = InstanceReported("i0", 3, 2, 0.75, preemptions=4)
    told(InstanceReported("i0", 1, 0, 0.1), report)
    assert told.instance("i0").report == report
    told(InstanceJoined("i0", 8, BIG))
    assert told.instance("i0").report is None, "it was restarted"
    told(InstanceReported("nobody", 1, 0, 0.1))
    assert told.anomalies == {"unknown_instance": 1}


def test_prompt_history_goes_with_its_group() -> None:
    told = Told(prediction="prompt_history")
    told(ev.GroupSubmitted("a@2", 1, PROMPT, LIMIT, "a", (9, 7), 50))
    group = told.scheduler.state.groups["a@2"]
    assert group.prompt == "a"
    assert group.siblings.history.ascending == [7, 9]
    assert group.siblings.expected_tokens == 50


def test_leaving_instance_is_released_once_it_is_idle() -> None:
    told = Told(instances=2)
    assert told(ev.InstanceLeaving("i0")) == [Release("i0")]
    told(RequestSubmitted("d", "", PROMPT, LIMIT))
    assert told(ev.InstanceLeaving("i1")) == told(ev.InstanceLeaving("i1")) == []
    assert Release("i1") in told(ev.RequestFinished("d", 1, 3))


class TestGate:
    """Somebody else has an instance in hand."""

    def test_nothing_new_is_sent_until_it_opens(self) -> None:
        told = Told()
        told(RequestSubmitted("d0", "", PROMPT, LIMIT), ev.GateClosed("i0"))
        assert told(RequestSubmitted("d1", "", PROMPT, LIMIT)) == []
        assert told.running == ["d0"], "what runs there goes on"
        told(ev.RequestFinished("d0", 1, 3))
        assert told.running == []
        (sent,) = told(ev.GateOpened("i0"))
        assert sent.request == "d1"

    def test_it_goes_elsewhere_where_there_is_somebody(self) -> None:
        told = Told(instances=2)
        told(ev.GateClosed("i0"))
        (sent,) = told(RequestSubmitted("d", "", PROMPT, LIMIT))
        assert sent.instance == "i1"

    def test_of_an_instance_that_is_not_here(self) -> None:
        told = Told()
        told(ev.GateClosed("nobody"))
        assert told.anomalies == {"unknown_instance": 1}

    def test_rejoined_instance_has_an_open_gate(self) -> None:
        told = Told()
        told(ev.GateClosed("i0"), InstanceLost("i0"), InstanceJoined("i0", 8, BIG))
        assert told(RequestSubmitted("d", "", PROMPT, LIMIT))


class TestTheTrainerLoads:
    """Whoever trains brings the weights itself, and says nothing of it but what is found."""

    def test_the_run_and_its_labels_follow(self) -> None:
        told = Told()
        told(RequestSubmitted("d", "", PROMPT, LIMIT))
        assert told(ev.WeightsPublished(3, loads=False)) == []
        assert told(ev.WeightsUpdated("i0", 3)) == []
        (answer,) = told(ev.RequestFinished("d", 1, 9, ((0, 4), (3, 5))))
        assert [(s.version, s.tokens) for s in answer.sample.segments] == [(0, 4), (3, 5)]
        assert answer.sample.staleness == 3
        assert told.anomalies == {}

    def test_repeated_update_is_an_anomaly(self) -> None:
        told = Told()
        told(ev.WeightsPublished(1, loads=False), ev.WeightsUpdated("i0", 1))
        told(ev.WeightsUpdated("i0", 1), ev.WeightsUpdated("i0", 0))
        assert told.anomalies == {"update_not_asked_for": 2}
        assert told.instance("i0").version == 1


class TestOlderThanItWasSaidToBe:
    """An instance made tokens with older weights than anybody knew of."""

    def told(self, max_staleness: int) -> Told:
        freshness = {"use": "bounded", "max_staleness": max_staleness}
        told = Told(2, version=4, batching="fully_async", freshness=freshness)
        told.submit("a", samples=2)
        return told

    @pytest.mark.parametrize(
        "event",
        [
            ev.RequestFinished("a/0", 1, 9, ((2, 9),)),
            ev.RequestInterrupted("a/0", 1, 9, ((2, 9),)),
            ev.TurnFinished("a/0", 1, 9, ((2, 5), (4, 4))),
        ],
    )
    def test_stale_answer_starts_over(self, event: Event) -> None:
        told = self.told(max_staleness=1)
        assert sum(action.tokens for action in told(event) if isinstance(action, Discard)) == 9
        assert told.request("a/0").response_tokens == 0

    def test_fresh_answer_keeps_its_version(self) -> None:
        told = self.told(max_staleness=2)
        told(ev.RequestFinished("a/0", 1, 9, ((2, 9),)), ev.RequestFinished("a/1", 2, 9, ((4, 9),)))
        assert told.scheduler.state.groups["a"].oldest_version == 2
        assert told.scheduler.state.progress.complete == 1
