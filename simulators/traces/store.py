"""Recorded workloads: read them from any known format, write them in ours, list the shipped ones.

The native format is described in docs/trace_format.md; foreign formats are in importers.py.
"""

import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from rollout_sched.simulators.traces import importers
from rollout_sched.simulators.traces.files import Lines, numbered_lines, write_lines
from rollout_sched.simulators.traces.importers import Counting
from rollout_sched.simulators.traces.model import Gatherer, Sample, Trace, TraceError
from rollout_sched.simulators.traces.native_format import (
    encoded_header,
    encoded_sample,
    native_header,
    native_samples,
)

_DATA = Path(__file__).with_name("data")
_SHIPPED_SUFFIX = ".jsonl.gz"


def read(source: str | os.PathLike[str], counting: Counting | None = None) -> Trace:
    """The trace in a file, or the shipped trace of that name; a file of that name wins.

    The format is found by content, not by the file's name. counting says how to count the
    tokens of sources that hold text (default: 3.3 characters per token, said in the labels).
    TraceError, before any sample is used, names the file, line, field, finding and remedy.
    """
    path = _path_of(source)
    lines = numbered_lines(path)
    first = next(lines, None)
    if first is None:
        raise TraceError(str(path), "the file is empty", "record or convert the trace again")
    header = native_header(str(path), *first)
    if header is not None:
        gatherer = _gathered(str(path), native_samples(str(path), lines))
        return Trace(
            name=header.name or _stem(path),
            groups=gatherer.groups(),
            about=header.about,
            source=header.source,
            license=header.license,
            max_response_tokens=header.max_response_tokens,
        )
    return _imported(path, chain([first], lines), counting or Counting())


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace in the native format, gzip if the name ends in .gz.

    The file appears whole or not at all; equal traces give equal bytes. TraceError if a sample
    would not be readable again (a zero length, a NaN time), OSError from the file system.
    """
    where = f"trace {trace.name!r}"
    samples = (encoded_sample(where, sample) for sample in trace.samples())
    write_lines(Path(path), chain([encoded_header(trace)], samples))


def shipped() -> dict[str, str]:
    """Name -> one line about it, of every trace that comes with the package."""
    listing = {}
    for path in sorted(_DATA.glob(f"*{_SHIPPED_SUFFIX}")):
        header = native_header(str(path), *next(numbered_lines(path)))
        listing[_stem(path)] = header.about if header else ""
    return listing


def _path_of(source: str | os.PathLike[str]) -> Path:
    path = Path(source)
    if path.exists():
        return path
    packed = _DATA / f"{path.name}{_SHIPPED_SUFFIX}"
    if os.fspath(source) == path.name and packed.exists():
        return packed
    names = ", ".join(_stem(shipped) for shipped in sorted(_DATA.glob(f"*{_SHIPPED_SUFFIX}")))
    raise TraceError(
        os.fspath(source), "no such file", f"check the path, or name a shipped trace: {names}"
    )


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").rsplit(".", 1)[0]


def _imported(path: Path, lines: Lines, counting: Counting) -> Trace:
    form, samples = importers.import_samples(str(path), lines, counting)
    gatherer = _gathered(str(path), samples)
    return Trace(name=_stem(path), groups=gatherer.groups(), about=form)


def _gathered(where: str, samples: Iterable[tuple[int, Sample]]) -> Gatherer:
    gatherer = Gatherer(where)
    for line, sample in samples:
        gatherer.add(sample, line)
    return gatherer
