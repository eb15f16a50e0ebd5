"""Asking an instance: how long we wait, what we repeat of its errors, whose cancellation it is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollout_sched.live.ports import InstanceError, printable

T = TypeVar("T")


async def ask(question: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Its answer. Raises InstanceError if none comes within `limit_s` seconds."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await question
    except TimeoutError as error:
        text = f"no answer within {limit_s:g} s" if limit.expired() else said(error)
        raise InstanceError(text) from error


def said(error: Exception) -> str:
    """In a line, for logs and answers."""
    return printable(str(error) or type(error).__name__)


def unquoted(error: Exception) -> str:
    """The same without a word of what an instance answered, which may quote a prompt."""
    words = getattr(error, "unquoted", None)
    return said(error) if words is None else printable(words)


def is_ending() -> bool:
    """Whether it is this task that is cancelled, not something that it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
