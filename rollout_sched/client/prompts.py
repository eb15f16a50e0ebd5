"""Checks a trainer's prompts before they are submitted.

A struct accepts any values. Without this check, a wrong value would fail far from here: at an
instance that refuses it, or when it is serialised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rollout_sched.core.model.errors import CallerError
from rollout_sched.live.trainer.samples import Prompt

#: Fields not checked here: `extra` is returned unchanged, sampling may hold vLLM objects.
_OPAQUE: dict[str, Any] = {"sampling": {}, "each": [], "extra": {}}


def checked(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """The prompts with plain integers and lists. Raises CallerError at the first invalid prompt,
    with the group, the field and the error."""
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
    """A numpy or torch array or number as a Python list or number."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"got a {type(value).__name__}, expected a number, a string or a list")


def _sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(sampling, dict):
        raise TypeError(f"sampling must be a dict, not a {type(sampling).__name__}")
    return {
        name: _listed(value) if hasattr(value, "tolist") else value
        for name, value in sampling.items()
    }
