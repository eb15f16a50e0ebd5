"""Policy and scenario files: accepted, or refused with an error that names the file.

An accepted file can be built, and gives the same result when it is read again.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollout_sched.config import ConfigError, load_policy, shipped
from rollout_sched.live.live_scheduler import settings_of
from rollout_sched.simulators.replay.scenario import load_scenario
from tests.fuzz.laws import hold

POLICIES = "policies/presets"
SCENARIOS = "simulators/replay/scenarios"

_WORDS = (
    *(
        b"use",
        b" = ",
        b"\n",
        b"[",
        b"]",
        b"[[",
        b"]]",
        b'"',
        b"'",
        b'"""',
        b"#",
        b".",
        b",",
        b"{",
        b"}",
    ),
    *(b"true", b"nan", b"-inf", b"1979-05-27T07:32:00Z", b"07:32:00", b"0x1f", b"1_000", b"1e400"),
    *(b"[]", b"{}", b'""', b"-1", b"9" * 30, b"9" * 5000, b"[" * 2000, b"a." * 2000, b"\\ud800"),
    *(
        b"[[faults]]\n",
        b"[faults]\n",
        b"what = ",
        b"[live]\n",
        b"poll_s = ",
        b"about = ",
        b"\xef\xbb\xbf",
    ),
)


class TomlFiles:
    """`load` reads a file and uses it as its users would."""

    def __init__(self, name: str, room: str, load: Callable[[str], Any]) -> None:
        self.name = name
        self._load = load
        self._texts = [
            files("rollout_sched").joinpath(room, f"{file}.toml").read_bytes()
            for file in shipped(room)
        ]
        self.corpus: Sequence[bytes] = (b"", *self._texts)
        lines = {line for text in self._texts for line in text.splitlines() if line}
        self._lines = sorted(lines)
        self.words = (*_WORDS, *self._lines)
        self._folder = ""

    def make(self, rng: random.Random) -> bytes:
        """Misplaced lines of shipped files."""
        lines = rng.choice(self._texts).splitlines()
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(lines) + 1)
            lines[at : at + rng.randrange(2)] = [rng.choice(self._lines)]
        if rng.random() < 0.5:
            at = rng.randrange(len(lines))
            key, equals, _ = lines[at].partition(b"=")
            if equals:
                lines[at] = key + b"= " + rng.choice(_WORDS)
        return b"\n".join(lines)

    def check(self, data: bytes) -> None:
        path = self._path(data)
        try:
            first = self._load(str(path))
        except ConfigError as error:
            told = str(error)
            hold("an error names the file", path.stem in told, told)
            hold("an error is short", len(told) < 20_000, len(told))
            return
        hold("a file gives the same result each time", self._load(str(path)) == first, first)

    def spend(self, data: bytes) -> None:
        try:
            self._load(str(self._path(data)))
        except ConfigError:
            return

    def _path(self, data: bytes) -> Path:
        if not self._folder:
            self._folder = tempfile.mkdtemp()
        path = Path(self._folder) / "fuzzed.toml"
        path.write_bytes(data)
        return path


def _policy(path: str) -> Any:
    policy = load_policy(path)
    policy.build(lengths=lambda group, index: 0)
    settings_of(policy)
    return policy.roles, policy.live


def policies() -> TomlFiles:
    return TomlFiles("policies", POLICIES, _policy)


def scenarios() -> TomlFiles:
    return TomlFiles("scenarios", SCENARIOS, load_scenario)
