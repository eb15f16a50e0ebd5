"""Reads `fanout_table.toml`: to which instances a call that is meant for one server goes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollout_sched.integrations.gateway.control_plane.weight_protocol import ProtocolStep
from rollout_sched.integrations.vllm.ranks import RankFields

_FILE = Path(__file__).with_name("fanout_table.toml")


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row; the file explains each field. Raises ValueError for fields that contradict."""

    to: Literal["all", "rewrite", "one", "refuse"]
    pause: Literal["hold", "release"] | None = None
    away: bool = False
    update: ProtocolStep | None = None
    ranks: RankFields | None = None
    sum: str = ""
    because: str = ""
    paths: list[str] = []

    def __post_init__(self) -> None:
        if (self.to == "rewrite") != (self.ranks is not None):
            raise ValueError('`ranks` belongs to "rewrite", and "rewrite" needs it')
        if (self.to == "refuse") != bool(self.because):
            raise ValueError('`because` belongs to "refuse", and "refuse" needs it')
        if self.away and (self.update or self.sum):
            raise ValueError("`away` cannot be combined with `update` or `sum`")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    calls: dict[str, Rule]
    rpc: dict[str, ProtocolStep]
    rpc_paths: dict[str, list[str]] = {}


class FanoutTable:
    """The rules by method and path."""

    def __init__(
        self,
        calls: Mapping[tuple[str, str], Rule],
        rpc: Mapping[str, ProtocolStep],
        rpc_paths: Mapping[str, list[str]],
    ) -> None:
        self.calls = calls
        self._rpc = rpc
        self._rpc_paths = rpc_paths

    def of(self, method: str, path: str) -> Rule | None:
        return self.calls.get((method, path))

    def path_fields(self, method: str, path: str, body: bytes) -> frozenset[str]:
        """The fields of a call's body that name weights on disk."""
        rule = self.of(method, path)
        if rule is None:
            return frozenset()
        if rule.update is ProtocolStep.BY_METHOD:
            return frozenset(self._rpc_paths.get(_called(body), ()))
        return frozenset(rule.paths)

    def step(self, rule: Rule, body: bytes) -> ProtocolStep | None:
        """The weight update step of a call; for /collective_rpc its body decides."""
        return (
            self._rpc.get(_called(body)) if rule.update is ProtocolStep.BY_METHOD else rule.update
        )


class _Rpc(msgspec.Struct):
    method: str


def _called(body: bytes) -> str:
    """The worker's method; "" for an invalid body, about which the instances report the error."""
    try:
        return msgspec.json.decode(body, type=_Rpc).method
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


@cache
def shipped() -> FanoutTable:
    """The table of this version."""
    return read(_FILE.read_text("utf-8"))


def read(text: str) -> FanoutTable:
    """Raises ValueError with the row."""
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
    return FanoutTable(calls, file.rpc, file.rpc_paths)
