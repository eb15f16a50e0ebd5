"""Which line of text an attempt writes, and who may go on with it."""

from __future__ import annotations

from rollout_sched.live.ports import Order
from rollout_sched.simulators.fake_instance.answers import OpenAnswer, OpenAnswers


def begun(answers: OpenAnswers, name: str) -> tuple[int, OpenAnswer]:
    """All say the same to the same prompt."""
    order = Order(name, [1, 2], 9, "", {"temperature": 0.0})
    request, answer = answers.read(order, None)
    answers.open(request.attempt, answer)
    return request.attempt, answer


def test_a_line_has_one_writer_whoever_else_is_aborted_or_ends() -> None:
    answers = OpenAnswers(lambda order, response: 5, versioned_text=False)
    first, aborted = begun(answers, "a")
    answers.stop_writing(aborted)
    _, writer = begun(answers, "b")
    assert writer.stream == aborted.stream
    answers.stop_writing(aborted)  # once more, as it is cancelled
    _, another = begun(answers, "c")
    answers.close(first)
    _, last = begun(answers, "d")
    assert len({writer.stream, another.stream, last.stream}) == 3


def test_who_has_ended_leaves_its_line_to_others() -> None:
    answers = OpenAnswers(lambda order, response: 5, versioned_text=False)
    number, ended = begun(answers, "a")
    answers.close(number)
    _, other = begun(answers, "b")
    assert other.stream == ended.stream
