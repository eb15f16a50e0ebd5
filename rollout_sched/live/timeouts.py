"""Calls to an instance: timeout, error text, and whose cancellation it is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollout_sched.live.ports import InstanceError, printable

T = TypeVar("T")


async def with_timeout(question: Coroutine[Any, Any, T], limit_s: float) -> T:
    """The answer. Raises InstanceError if none comes within `limit_s` seconds."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await question
    except TimeoutError as error:
        text = f"no answer within {limit_s:g} s" if limit.expired() else error_line(error)
        raise InstanceError(text) from error


def error_line(error: Exception) -> str:
    """The error as one line, for logs and answers."""
    return printable(str(error) or type(error).__name__)


def plain_message(error: Exception) -> str:
    """The error as one line, without the instance's own words, which may quote a prompt."""
    words = getattr(error, "unquoted", None)
    return error_line(error) if words is None else printable(words)


def is_cancelled() -> bool:
    """Whether this task itself is cancelled, not something that it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
