"""Reads the few needed figures from vLLM's `/metrics` without parsing the other 53 KB."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec

from rollout_sched.core.model.records import MAX_SERIAL
from rollout_sched.integrations.vllm.protocol import endpoints as names
from rollout_sched.live.ports import Gauges, InstanceError

_MAX_SAMPLES = 4096  # of one metric: engines, with some labels each

#: What polls cannot do without: an instance would seem to be empty, or to forget its requests.
_NEEDED = (names.RUNNING, names.WAITING, names.KV_USAGE)

_LABEL = re.compile(rb'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


class CacheConfig(msgspec.Struct, frozen=True):
    """`engines` of one instance (data-parallel ranks), and the tokens of all their KV caches."""

    engines: int
    kv_tokens: int


def samples(text: bytes, name: str) -> Iterator[tuple[bytes, float]]:
    """(labels, value) of each sample of a metric. Raises InstanceError if a value is not a number,
    or out of range."""
    key = name.encode()
    at = text.find(key)
    found = 0
    while at >= 0:
        found += 1
        if found > _MAX_SAMPLES:
            raise InstanceError(f"/metrics has {name} more than {_MAX_SAMPLES} times")
        after = at + len(key)
        starts_line = at == 0 or text[at - 1 : at] == b"\n"  # else a comment or a longer name
        if starts_line and text[after : after + 1] in (b"{", b" "):
            end = text.find(b"\n", after)
            labels, _, value = text[after : end if end >= 0 else len(text)].rpartition(b" ")
            yield labels, _number(name, value)
        at = text.find(key, after)


def total(text: bytes, name: str, label: bytes = b"") -> float:
    """The sum over engines of the samples whose labels contain `label`; 0 if there is none."""
    return sum(value for labels, value in samples(text, name) if label in labels)


def gauges(text: bytes) -> Gauges:
    """Load and counters, over all engines of the instance. `kv_usage` is their mean.

    vLLM does not count tokens prefilled again after a preemption, so `reprefilled_tokens` is 0.
    Raises InstanceError if one of them is missing that polls need, or out of range.
    """
    found = {name: [value for _, value in samples(text, name)] for name in _NEEDED}
    missing = [name for name, values in found.items() if not values]
    if missing:
        raise InstanceError(
            f"/metrics has no {', '.join(missing)}: use a vLLM that reports it, without "
            "--disable-log-stats, and let proxies pass all of /metrics"
        )
    usage = found[names.KV_USAGE]
    told = {
        "running": int(sum(found[names.RUNNING])),
        "waiting": int(sum(found[names.WAITING])),
        "kv_usage": min(1.0, sum(usage) / len(usage)),
        "preemptions": int(total(text, names.PREEMPTIONS)),
        "prefill_tokens": int(_prompt_tokens(text, names.COMPUTED)),
        "cached_tokens": int(_prompt_tokens(text, names.CACHED)),
        "generated_tokens": int(total(text, names.GENERATED_TOKENS)),
        "drafts": int(total(text, names.DRAFTS)),
        "drafted_tokens": int(total(text, names.DRAFTED_TOKENS)),
        "accepted_tokens": int(total(text, names.ACCEPTED_TOKENS)),
        "started_at": started_at(text),
    }
    try:
        return msgspec.convert(told, Gauges)
    except msgspec.ValidationError as error:
        raise InstanceError(f"/metrics, over all engines: {error}") from error


def _prompt_tokens(text: bytes, source: str) -> float:
    return total(text, names.PROMPT_TOKENS, b'"%b"' % source.encode())


def cache_config(text: bytes, kv_tokens: int | None = None) -> CacheConfig:
    """From `vllm:cache_config_info`, which has one sample for each engine, all of them equal.

    `kv_tokens`: tokens of all engines, needed if the server does not report them; else raises
    InstanceError.
    """
    engines = [labels for labels, _ in samples(text, names.CACHE_CONFIG)]
    if kv_tokens is not None:
        return CacheConfig(max(1, len(engines)), kv_tokens)
    try:
        config = dict(_LABEL.findall(engines[0]))
        block_size = _size(config[b"block_size"])
        told = config.get(b"kv_cache_size_tokens", b"None")  # per engine, in newer versions
        # num_gpu_blocks is the sum over engines (vllm/v1/engine/core_client.py, line 852).
        kv_tokens = (
            _size(config[b"num_gpu_blocks"], block_size)
            if told == b"None"
            else _size(told, len(engines))
        )
    except (IndexError, KeyError, ValueError) as error:
        raise InstanceError(
            f"it is up, but does not report the size of its KV cache ({names.CACHE_CONFIG} in "
            f"/metrics: {error!r}): give kv_tokens, with the value that vLLM logs at start as "
            '"GPU KV cache size"'
        ) from error
    return CacheConfig(len(engines), kv_tokens)


def cache_labels(text: bytes) -> dict[str, str]:
    """The labels of the first engine's `vllm:cache_config_info`; empty if there is none."""
    labels = next((labels for labels, _ in samples(text, names.CACHE_CONFIG)), b"")
    return {key.decode(): value.decode(errors="replace") for key, value in _LABEL.findall(labels)}


def _size(value: bytes, times: int = 1) -> int:
    size = int(value) * times if value.isdigit() and len(value) < 16 else 0
    if not 0 < size <= MAX_SERIAL:
        raise ValueError(f"{value[:40]!r} is not a size")
    return size


def started_at(text: bytes) -> float:
    """Unix seconds; 0 if not reported."""
    return total(text, names.STARTED_AT)


def _number(name: str, value: bytes) -> float:
    try:
        number = float(value)
    except ValueError as error:
        raise InstanceError(f"/metrics: {name} is not a number: {value[:40]!r}") from error
    if not (math.isfinite(number) and 0 <= number <= MAX_SERIAL):
        raise InstanceError(f"/metrics: {name} is out of range: {number}")
    return number
