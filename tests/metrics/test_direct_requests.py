"""Direct requests: how many, how long, and what became of the others."""

from __future__ import annotations

from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Answer, Discard
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.core.model.records import RunState
from rollout_sched.metrics.fold import Folded
from rollout_sched.metrics.outages import DirectFigures, DirectFold


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


def test_what_ended_without_an_answer() -> None:
    book = Book()
    book.ask(1.0, "a", "b", "c", "d")
    book.discard(2.0, "a", "withdrawn")
    book.discard(2.0, "b", "failed")
    book.discard(2.0, "c", "oversized")
    book.discard(2.0, "d", "untrue", ends=False)
    book.discard(2.0, "g/0", "surplus")
    figures = book.fold.figures()
    assert (figures.withdrawn, figures.failed, figures.answered) == (1, 2, 0)


def test_a_restart_of_the_scheduler_breaks_them_off() -> None:
    book = Book()
    book.ask(1.0, "a", "b")
    book.answer(2.0, "a")
    book.folded.observe(3.0, ev.Restored(RunState()), [])
    figures = book.fold.figures()
    assert (figures.submitted, figures.answered, figures.failed) == (2, 1, 1)
