"""Checks paths to weights in the bodies of calls that are passed on to instances."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.fanout_table import shipped
from rollout_sched.integrations.vllm.off_loop import off_loop
from rollout_sched.integrations.vllm.weight_roots import WeightRoots
from rollout_sched.integrations.vllm.weights import CHECK_LIMIT_S

#: Beginnings of paths, for fields that are not known to be paths. Handles of GPU memory, which are
#: pickled and in base64, begin with "gA".
_BEGINNINGS = ("/", "~", "file:")


class NamedWeights:
    """Checks bodies against the allowed folders, if there are any."""

    def __init__(self, roots: WeightRoots) -> None:
        self.roots = roots

    async def check(self, method: str, path: str, body: bytes) -> None:
        """Raises CallerError for a body with a path outside of the allowed folders, or that is not
        JSON: an instance might parse it differently."""
        if not (self.roots.known and body):
            return
        try:
            told = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CallerError(f"body: {error}; with --weights-root it must be JSON") from error
        fields = shipped().path_fields(method, path, body)
        named = list(_paths(told, fields))
        try:
            await off_loop(partial(self._check_all, named), CHECK_LIMIT_S)
        except OSError as error:  # TimeoutError is one
            raise CallerError(f"weights {named}: {error or 'the disk does not answer'}") from error

    def _check_all(self, paths: list[str]) -> None:
        for path in paths:
            self.roots.check(path)


def _paths(told: Any, fields: frozenset[str], *, named: bool = False) -> Iterator[str]:
    """Strings in one of the `fields`, at any depth, and other strings that look like paths."""
    if isinstance(told, str):
        if named or told.startswith(_BEGINNINGS):
            yield told
    elif isinstance(told, dict):
        for field, value in told.items():
            yield from _paths(value, fields, named=named or field in fields)
    elif isinstance(told, list):
        for value in told:
            yield from _paths(value, fields, named=named)
