"""What is asked of an instance ends in time, with an error that fits into a line."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.live.ports import InstanceError, error_line, is_cancelled, with_timeout


async def after(seconds: float, error: Exception | None = None) -> str:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error
    return "here"


@pytest.mark.parametrize(
    ("question", "error", "text"),
    [
        ((9.0, None), InstanceError, "no answer within 5 s"),
        ((1.0, TimeoutError("the socket's own")), InstanceError, "the socket's own"),
        ((1.0, TimeoutError()), InstanceError, "TimeoutError"),
        ((1.0, KeyError("slots")), KeyError, "slots"),
    ],
)
async def test_call_errors_are_reported(
    question: tuple[float, Exception | None], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await with_timeout(after(*question), 5.0)


async def test_an_answer_in_time() -> None:
    assert await with_timeout(after(4.0), 5.0) == "here"


def test_an_error_without_words_is_named() -> None:
    assert error_line(KeyError()) == "KeyError"
    assert error_line(ValueError("two\nlines")) == "two lines"


async def test_cancellation_of_the_task_is_told_from_that_of_the_call() -> None:
    seen = []

    async def asks(question: asyncio.Future[None]) -> None:
        try:
            await question
        except asyncio.CancelledError:
            seen.append(is_cancelled())

    for cancel_the_task in (False, True):
        question: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(asks(question))
        await asyncio.sleep(0)
        (task if cancel_the_task else question).cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert seen == [False, True]
