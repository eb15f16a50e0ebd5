"""Outages: who was lost, who left, who came back, and how long they were away."""

from __future__ import annotations

from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Answer, Discard
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.core.model.records import RunState
from rollout_sched.metrics.fold import Folded
from rollout_sched.metrics.outages import DirectFigures, DirectFold, OutageFigures, OutageFold


def figures(total_s: float, *entries: tuple[float, ev.Event, list[object]]) -> OutageFigures:
    fold = OutageFold()
    folded = Folded(fold)
    for now, event, actions in entries:
        folded.observe(now, event, actions)  # type: ignore[arg-type]
    return fold.figures(total_s)


def joined(now: float, name: str = "a") -> tuple[float, ev.Event, list[object]]:
    return now, ev.InstanceJoined(name, 8, 1000), []


def lost(now: float, name: str = "a") -> tuple[float, ev.Event, list[object]]:
    return now, ev.InstanceLost(name), []


def test_a_quiet_run_has_none() -> None:
    assert figures(99.0, joined(0.0), joined(0.0, "b")) == OutageFigures(0, 0, 0, 0.0, 0, 0)


def test_lost_instance_returns() -> None:
    of = figures(100.0, joined(0.0), lost(10.0), joined(30.0), lost(90.0))
    assert (of.instances_lost, of.instances_returned) == (2, 1)
    assert of.away_s == 20.0 + 10.0


def test_released_instance_is_no_outage() -> None:
    removed = (5.0, ev.InstanceLost("a", requested=True), [])
    of = figures(100.0, joined(0.0), removed, joined(50.0), lost(60.0))
    assert (of.instances_left, of.instances_lost) == (1, 1)
    assert of.away_s == 45.0 + 40.0


def test_unnoticed_restart_is_an_outage() -> None:
    of = figures(100.0, joined(0.0), joined(40.0))
    assert (of.instances_lost, of.instances_returned, of.away_s) == (1, 1, 0.0)


def test_unknown_instance_is_not_lost() -> None:
    assert figures(100.0, lost(5.0)).instances_lost == 0


def test_failures() -> None:
    failing = [Discard(f"g/{n}", 0, "failed", True, group="g", index=n) for n in range(3)]
    client = [Discard("direct.1", 0, "failed", True)]
    of = figures(
        9.0,
        (1.0, ev.RequestFailed("g/0", 1), []),
        (2.0, ev.RequestFailed("g/0", 2), list(failing)),
        (3.0, ev.RequestFailed("direct.1", 3), list(client)),
    )
    assert (of.failed_attempts, of.failed_prompts) == (3, 1)


def test_a_scheduler_that_restarts_takes_no_instance_away() -> None:
    restored = (10.0, ev.Restored(RunState()), [])
    of = figures(50.0, joined(0.0), joined(0.0, "b"), restored, joined(10.0), joined(10.0, "b"))
    assert (of.scheduler_restarts, of.instances_lost, of.instances_returned) == (1, 0, 0)
    assert of.away_s == 0.0


class Book:
    def __init__(self) -> None:
        self.fold = DirectFold()
        self.folded = Folded(self.fold)

    def ask(self, now: float, *requests: str) -> None:
        for request in requests:
            self.folded.observe(now, ev.RequestSubmitted(request, "p", 10, 100), [])

    def answer(self, now: float, request: str, tokens: int = 7) -> None:
        sample = DeliveredSample(request, "p", 0, 10, tokens, (), 0, "stop")
        self.folded.observe(now, ev.RequestFinished(request, 1, tokens), [Answer(sample)])

    def discard(self, now: float, request: str, reason: str, *, ends: bool = True) -> None:
        self.folded.observe(now, ev.Woke(), [Discard(request, 3, reason, ends)])


def test_nothing_asked() -> None:
    assert DirectFold().figures() == DirectFigures(0, 0, 0, 0, 0, 0.0, 0.0, None, None)


def test_latencies_of_what_was_answered() -> None:
    book = Book()
    book.ask(1.0, *(f"d{n}" for n in range(100)))
    for n in range(100):
        book.answer(2.0 + n, f"d{n}")
    figures = book.fold.figures()
    assert (figures.submitted, figures.answered, figures.tokens) == (100, 100, 700)
    assert (figures.latency_p50_s, figures.latency_p99_s) == (50.0, 99.0)
    assert figures.first_token_p50_s is None


def test_first_tokens_as_they_were_heard() -> None:
    book = Book()
    book.ask(1.0, "a", "b", "c")
    book.folded.observe(2.0, ev.TokensArrived("a", 1, 0), [])
    book.folded.observe(3.0, ev.TokensArrived("a", 1, 4), [])
    book.folded.observe(4.0, ev.TokensArrived("a", 1, 9), [])
    book.folded.observe(4.0, ev.TokensArrived("a sample of a batch", 1, 9), [])
    book.answer(1.5, "b")  # over before anything was heard of it
    book.answer(9.0, "a")
    figures = book.fold.figures()
    assert (figures.first_token_p50_s, figures.first_token_p99_s) == (0.5, 2.0)
    assert figures.submitted - figures.answered == 1


def test_requests_without_an_answer_are_counted() -> None:
    book = Book()
    book.ask(1.0, "a", "b", "c", "d")
    book.discard(2.0, "a", "withdrawn")
    book.discard(2.0, "b", "failed")
    book.discard(2.0, "c", "oversized")
    book.discard(2.0, "d", "untrue", ends=False)
    book.discard(2.0, "g/0", "surplus")
    figures = book.fold.figures()
    assert (figures.withdrawn, figures.failed, figures.answered) == (1, 2, 0)


def test_scheduler_restart_ends_open_requests() -> None:
    book = Book()
    book.ask(1.0, "a", "b")
    book.answer(2.0, "a")
    book.folded.observe(3.0, ev.Restored(RunState()), [])
    figures = book.fold.figures()
    assert (figures.submitted, figures.answered, figures.failed) == (2, 1, 1)
