"""Which instances a call that is meant for one server goes to: the table of `fanout_table.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollout_sched.integrations.gateway.control_plane.weight_protocol import Step
from rollout_sched.integrations.vllm.ranks import RankFields

_FILE = Path(__file__).with_name("fanout_table.toml")


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row; the file says what each field means. Raises ValueError for what contradicts itself."""

    to: Literal["all", "rewrite", "one", "refuse"]
    pause: Literal["hold", "release"] | None = None
    away: bool = False
    update: Step | None = None
    ranks: RankFields | None = None
    sum: str = ""
    because: str = ""

    def __post_init__(self) -> None:
        if (self.to == "rewrite") != (self.ranks is not None):
            raise ValueError('`ranks` belongs to "rewrite", and "rewrite" needs it')
        if (self.to == "refuse") != bool(self.because):
            raise ValueError('`because` belongs to "refuse", and "refuse" needs it')
        if self.away and (self.update or self.sum):
            raise ValueError("what has not joined has no part in weights and sums")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    calls: dict[str, Rule]
    rpc: dict[str, Step]


class FanoutTable:
    """The rules by method and path."""

    def __init__(self, calls: Mapping[tuple[str, str], Rule], rpc: Mapping[str, Step]) -> None:
        self.calls = calls
        self._rpc = rpc

    def of(self, method: str, path: str) -> Rule | None:
        return self.calls.get((method, path))

    def step(self, rule: Rule, body: bytes) -> Step | None:
        """The step of a weight update that a call is; of /collective_rpc its body says which."""
        if rule.update is not Step.BY_METHOD:
            return rule.update
        try:
            called = msgspec.json.decode(body, type=_Rpc).method
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # the instances will say what is wrong with it
        return self._rpc.get(called)


class _Rpc(msgspec.Struct):
    method: str


@cache
def shipped() -> FanoutTable:
    """That of this version."""
    return read(_FILE.read_text("utf-8"))


def read(text: str) -> FanoutTable:
    """Raises ValueError naming the row."""
    try:
        raw: dict[str, Any] = tomllib.loads(text)
        file = msgspec.convert(raw, _File)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{_FILE.name}: {error}") from error
    calls = {}
    for name, rule in file.calls.items():
        method, _, path = name.partition(" ")
        if method not in ("GET", "POST") or not path.startswith("/"):
            raise ValueError(f'{_FILE.name}: {name!r} is not "GET /path" or "POST /path"')
        calls[method, path] = rule
    return FanoutTable(calls, file.rpc)
