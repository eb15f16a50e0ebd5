"""Prompts as a trainer has them, checked before they go anywhere.

A struct takes whatever it is made with. What is wrong with it would be told far from here: by an
instance that refuses it, or by a wire that it cannot travel on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.live.samples import Prompt

#: Fields that are the caller's: `extra` comes back as it went, sampling may hold objects of vLLM's.
_OPAQUE: dict[str, Any] = {"sampling": {}, "each": [], "extra": {}}


def checked(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Prompts of plain integers and lists. Raises CallerError at the first that is none, with the
    group, the field and what is wrong there."""
    if isinstance(prompts, Prompt) or not isinstance(prompts, Iterable):
        raise CallerError(f"submit takes a list of Prompts, not a {type(prompts).__name__}")
    return map(_checked, prompts)


def _checked(prompt: Prompt) -> Prompt:
    if not isinstance(prompt, Prompt):
        raise CallerError(f"submit takes Prompts, not a {type(prompt).__name__}")
    shape = msgspec.structs.replace(prompt, **_OPAQUE)
    try:
        plain = msgspec.convert(msgspec.to_builtins(shape, enc_hook=_listed), Prompt)
        return msgspec.structs.replace(
            plain,
            sampling=_sampling(prompt.sampling),
            each=[_sampling(sampling) for sampling in prompt.each],
            extra=prompt.extra,
        )
    except (msgspec.ValidationError, TypeError) as error:
        raise CallerError(f"group {prompt.uid!r}: {error}") from error


def _listed(value: Any) -> Any:
    """An array or a number of numpy or torch as Python has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} where a number, a text or a list is expected")


def _sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(sampling, dict):
        raise TypeError(f"sampling is a dict, not a {type(sampling).__name__}")
    return {
        name: _listed(value) if hasattr(value, "tolist") else value
        for name, value in sampling.items()
    }
