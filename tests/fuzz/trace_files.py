"""Trace files of every format: read, or refused with an error that names the place and the remedy.

A trace that was read can be counted, and written and read again without a change.
"""

from __future__ import annotations

import contextlib
import gzip
import random
import tempfile
from pathlib import Path

from rollout_sched.simulators import traces
from rollout_sched.simulators.traces.command import statistics
from tests.fuzz.corpus import kept
from tests.fuzz.laws import hold

_ODD = (
    *(
        b"-1",
        b"0",
        b"1.5",
        b"1e9",
        b"9" * 25,
        b"1e308",
        b"nan",
        b"null",
        b"true",
        b'""',
        b"[]",
        b"{}",
    ),
    *(b'"x"', b"1e-9", b"1_0", b" 7 ", b"0x10", b"\xc2\xb9"),
)
_WORDS = (
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"\n",
        b"\r\n",
        b"\x00",
        b"\xef\xbb\xbf",
        b"\xff",
        b"[",
    ),
    *(b"[" * 3000, b'{"a":' * 2000, b'"' + b"x" * 3000, b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"),
    *(b"group,sample,", b'"group":', b'"turns":[[1,0,0.0]]', b'"schema":"rollout-sched-trace/1"'),
)


class TraceFiles:
    """The corpus has one file for each format."""

    name = "traces"
    words = (*_WORDS, *_ODD)

    def __init__(self) -> None:
        self.corpus = (b"", *kept(self.name))
        self._folder = Path(tempfile.mkdtemp())

    def make(self, rng: random.Random) -> bytes:
        """Lines of a seed with changed numbers; sometimes compressed and then damaged."""
        lines = rng.choice(self.corpus[1:]).splitlines(keepends=True)
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(lines))
            lines[at] = _changed(lines[at], rng)
        if rng.random() < 0.2:
            rng.shuffle(lines)
        data = b"".join(lines * rng.choice((1, 1, 1, 2)))
        if rng.random() < 0.1:
            packed = bytearray(gzip.compress(data, mtime=0))
            packed[rng.randrange(len(packed))] ^= rng.choice((0, 1, 255))
            return bytes(packed)
        return data

    def check(self, data: bytes) -> None:
        path = self._folder / "fuzzed"
        path.write_bytes(data)
        try:
            trace = traces.read(path)
        except traces.TraceError as error:
            told = str(error)
            hold("an error names the file", str(path) in told, told)
            hold("an error names the remedy", bool(error.found and error.remedy), told)
            hold("an error is short", len(told) < 4000, told)
            return
        hold("a read trace has samples", trace.sample_count > 0)
        statistics(trace)
        again = self._folder / "again.jsonl"
        traces.write(trace, again)
        hold("a rewritten trace is equal", traces.read(again).groups == trace.groups)

    def spend(self, data: bytes) -> None:
        path = self._folder / "fuzzed"
        path.write_bytes(data)
        with contextlib.suppress(traces.TraceError):
            traces.read(path)


def _changed(line: bytes, rng: random.Random) -> bytes:
    """The line with one of its values changed."""
    ends = [at for at, byte in enumerate(line) if byte in b",:]}[\n"]
    if len(ends) < 2:
        return line + rng.choice(_ODD)
    at = rng.randrange(len(ends) - 1)
    return line[: ends[at] + 1] + rng.choice(_ODD) + line[ends[at + 1] :]
