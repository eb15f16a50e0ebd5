"""The native trace format, line by line: a header, then one JSON object per sample.

docs/trace_format.md describes it for users. Each line is decoded by one typed msgspec call; only a
line that fails is decoded again, slowly, for the error message.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from rollout_sched.core.model.records import MAX_SIZE
from rollout_sched.simulators.traces.files import Lines
from rollout_sched.simulators.traces.model import (
    Length,
    SamplePlace,
    SampleRecord,
    Trace,
    TraceError,
    Turn,
    brief,
)

SCHEMA = "rollout-sched-trace/1"

PerStep = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]


# Brackets nested a thousand deep are rejected too.
_NOT_JSON = (msgspec.DecodeError, RecursionError)
_NOT_FINITE = re.compile(r"\b(NaN|Infinity)\b")


class TraceHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """First line of a native trace file."""

    schema: str
    name: str = ""
    about: str = ""
    source: str = ""
    license: str = ""
    max_response_tokens: Length | None = None
    prompts_per_step: PerStep | None = None
    samples_per_prompt: PerStep | None = None


_header_decoder = msgspec.json.Decoder(TraceHeader)
_sample_decoder = msgspec.json.Decoder(SampleRecord)
_encode = msgspec.json.Encoder().encode


def native_header(where: str, line: int, text: str) -> TraceHeader | None:
    """The header if this first line is a native one, None if the file is something else.

    Raises TraceError if it is a native header that this version cannot read.
    """
    try:
        found = msgspec.json.decode(text)
    except _NOT_JSON:
        return None
    if not isinstance(found, dict) or "schema" not in found:
        return None
    if found["schema"] != SCHEMA:
        remedy = "convert the file, or upgrade rollout-sched"
        if str(found["schema"]).startswith("rollout-sched-journal/"):
            remedy = "make a trace of it: rollout-sched journal trace JOURNAL --out TRACE.jsonl"
        raise TraceError(
            where,
            f"schema {brief(repr(found['schema']))}",
            f"this version reads {SCHEMA!r}: {remedy}",
            line=line,
            field="schema",
        )
    try:
        return _header_decoder.decode(text)
    except msgspec.ValidationError as error:
        raise _explained(where, line, TraceHeader, found, error) from error


def native_samples(where: str, lines: Lines) -> Iterator[tuple[SamplePlace, SampleRecord]]:
    """(place, sample) of every line after the header; raises TraceError on the first bad one."""
    decode = _sample_decoder.decode
    for line, text in lines:
        try:
            sample = decode(text)
        except msgspec.ValidationError as error:
            found = decoded_json(where, line, text)
            raise _explained(where, line, SampleRecord, found, error) from error
        except _NOT_JSON as error:
            raise _malformed(where, line, text, error) from error
        _check_last_turn(where, line, sample.turns)
        yield SamplePlace(where, line), sample


def encoded_header(trace: Trace) -> bytes:
    """The trace's header line, without its line end."""
    return _encode(
        TraceHeader(
            schema=SCHEMA,
            name=trace.name,
            about=trace.about,
            source=trace.source,
            license=trace.license,
            max_response_tokens=trace.max_response_tokens,
            prompts_per_step=trace.prompts_per_step,
            samples_per_prompt=trace.samples_per_prompt,
        )
    )


def encoded_sample(where: str, sample: SampleRecord) -> bytes:
    """The sample's line without defaults; raises TraceError if it could not be read back."""
    record: dict[str, object] = {
        "group": sample.group,
        "sample": sample.sample,
        "prompt_tokens": sample.prompt_tokens,
        "turns": [_trimmed(turn) for turn in sample.turns],
    }
    if sample.arrival_s != 0:
        record["arrival_s"] = sample.arrival_s
    if sample.finish != "stop":
        record["finish"] = sample.finish
    if sample.version is not None:
        record["version"] = sample.version
    if sample.labels:
        record["labels"] = dict(sample.labels)
    line = _encode(record)
    place = f"{where}, group {sample.group!r}, sample {sample.sample}"
    try:
        _sample_decoder.decode(line)
    except msgspec.ValidationError as error:
        raise _explained(place, None, SampleRecord, record, error) from error
    _check_last_turn(place, None, sample.turns)
    return line


def decoded_json(where: str, line: int, text: str, *, finite: bool = True) -> Any:
    """The JSON value in a line; raises TraceError if there is none.

    finite: whether NaN and Infinity, which Python's json writes, are errors; else they are null.
    """
    try:
        return msgspec.json.decode(text)
    except _NOT_JSON as error:
        if not finite and _NOT_FINITE.search(text):
            with suppress(ValueError, OverflowError, RecursionError):
                value = json.loads(text, parse_constant=lambda _: None)
                return msgspec.json.decode(msgspec.json.encode(value))  # refuses half characters
        raise _malformed(where, line, text, error) from error


def _malformed(where: str, line: int, text: str, error: Exception) -> TraceError:
    if _NOT_FINITE.search(text):
        return TraceError(where, "NaN or Infinity", "JSON allows finite numbers only", line=line)
    reason = str(error).removeprefix("JSON is malformed: ")
    remedy = "one whole JSON object per line; was the file cut off or edited?"
    return TraceError(where, f"malformed JSON ({reason}): {brief(text)}", remedy, line=line)


def _trimmed(turn: Turn) -> list[float]:
    if turn.tool_s != 0:
        return [turn.output_tokens, turn.observation_tokens, turn.tool_s]
    if turn.observation_tokens != 0:
        return [turn.output_tokens, turn.observation_tokens]
    return [turn.output_tokens]


def _check_last_turn(where: str, line: int | None, turns: tuple[Turn, ...]) -> None:
    last = turns[-1]
    if last.observation_tokens or last.tool_s:
        raise TraceError(
            where,
            f"the last turn has {last.observation_tokens} observation tokens"
            f" and {last.tool_s} tool seconds",
            "nothing follows the last turn: leave them out",
            line=line,
            field="turns",
        )


def _explained(
    where: str,
    line: int | None,
    wanted_type: type[msgspec.Struct],
    found: Any,
    error: msgspec.ValidationError,
) -> TraceError:
    """A TraceError from msgspec's `Expected ... - at $.path`, with the value found at that path."""
    wanted, _, path = str(error).partition(" - at `$")
    keys = re.findall(r"\.(\w+)|\[(\d+)\]", path)
    named = re.search(r"field `(.+)`", wanted)
    field = brief(path.rstrip("`").lstrip(".") or (named[1] if named else ""))
    if named:
        wanted = wanted.replace(named[1], brief(named[1]))
        known = "the fields are " + ", ".join(wanted_type.__struct_fields__)
        return TraceError(where, wanted, known, line=line, field=field)
    for name, index in keys:
        found = found[name] if name else found[int(index)]
    return TraceError(
        where, f"found {brief(repr(found))}", _lowered(wanted), line=line, field=field
    )


def _lowered(wanted: str) -> str:
    return wanted[:1].lower() + wanted[1:].replace("`", "")
