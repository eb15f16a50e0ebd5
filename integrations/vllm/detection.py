"""Detects what a vLLM server offers, with calls that change nothing, and the remedy for gaps."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from rollout_sched.core.model.records import MAX_COUNT
from rollout_sched.integrations.vllm import metrics_text
from rollout_sched.integrations.vllm.calls import NOT_IMPLEMENTED, EngineCalls, VllmCalls
from rollout_sched.integrations.vllm.control import ControlAnswer, ServerControl, decoded
from rollout_sched.integrations.vllm.dialects import Completions, Dialect, Generate
from rollout_sched.integrations.vllm.protocol import endpoints
from rollout_sched.integrations.vllm.protocol.refusals import refusal
from rollout_sched.live.ports import Description, InstanceError, printable

#: The endpoint to generate with; "auto" takes the better one that is offered.
Way = Literal["auto", "generate", "completions"]

_DEV_MODE = "set VLLM_SERVER_DEV_MODE=1 in vLLM's environment"
#: capability -> (endpoint, what is not possible without it, with the remedy)
_DEV_ENDPOINTS = {
    "pause": (
        endpoints.PAUSE,
        f"cannot be paused for a weight update; {_DEV_MODE}",
    ),
    "collective_rpc": (
        endpoints.COLLECTIVE_RPC,
        f"cannot reload weights from disk; {_DEV_MODE}",
    ),
    "weight_transfer": (
        f"/{endpoints.START_UPDATE}",
        "cannot receive weights by weight transfer; use vLLM 0.22 or newer, set "
        "VLLM_SERVER_DEV_MODE=1 in its environment and give --weight-transfer-config",
    ),
    "set_version": (
        endpoints.SET_LABEL,
        f"cannot label tokens with versions; use vLLM 0.28 or newer and {_DEV_MODE}",
    ),
}
#: The first vLLM that reports which weights made which tokens: by /inference/v1/generate, and where
#: a request asks for it.
_FIRST_WITH_SPANS = (0, 32)
_FIRST_WITH_SPANS_ASKED_FOR = (0, 33)

MAX_SLOTS = 2**20


class Findings(msgspec.Struct, frozen=True):
    """What was found.

    notes       in plain words, what is missing, with the remedy
    dialect     the endpoint that generates
    abort_path  the path for aborts; None if there is none
    calls       its other endpoints
    """

    description: Description
    dialect: Dialect
    abort_path: str | None
    notes: tuple[str, ...]
    calls: EngineCalls


_Size = Annotated[int, msgspec.Meta(gt=0, le=MAX_COUNT)]


class _Model(msgspec.Struct):
    id: str
    max_model_len: _Size | None = None  # missing for an adapter


class _Models(msgspec.Struct):
    data: list[_Model]


async def detect(
    control: ServerControl,
    endpoint: Way = "auto",
    slots: int | None = None,
    kv_tokens: int | None = None,
) -> Findings:
    """Ask a server what it is. Raises InstanceError, with the remedy, if it cannot be used.

    `slots` and `kv_tokens` are for the whole instance, and override what the server reports.
    """
    models = await served_models(control)
    max_model_len = next((m.max_model_len for m in models if m.max_model_len), None)
    if max_model_len is None:
        raise InstanceError("/v1/models does not report max_model_len: is it vLLM?")
    text = await _metrics(control)
    cache = metrics_text.cache_config(text, kv_tokens)
    metrics_text.gauges(text)  # without them it would join, and be lost at its first poll
    generates, aborts, dev_aborts, *dev = await _all(
        # The probes lack required fields, so the server refuses them before it generates or aborts
        # anything.
        _probe(control, "POST", Generate.target),
        _probe(control, "POST", endpoints.OPEN_ABORT),
        *(
            _probe(control, "GET", path)
            for path in (endpoints.DEV_ABORT, *(p for p, _ in _DEV_ENDPOINTS.values()))
        ),
    )
    notes: list[str] = []
    vllm = await _vllm_version(control)
    dialect = _dialect(endpoint, generates, notes, asks=vllm >= _FIRST_WITH_SPANS_ASKED_FOR)
    abort_path = _abort_path(aborts, dev_aborts, notes)
    capabilities = {dialect.capability} | ({"abort"} if abort_path else set())
    capabilities |= _dev_capabilities(dev, notes)
    if vllm >= _FIRST_WITH_SPANS and dialect.capability == "generate":
        capabilities.add("weight_versions")
    if vllm >= _FIRST_WITH_SPANS_ASKED_FOR:
        capabilities |= {"weight_versions", endpoints.ASK_VERSIONS}
    calls = VllmCalls(control, abort_path)
    version = await calls.weight_version()
    if "set_version" in capabilities:
        # A server that accepts a label also reports it; the label is ours, or the trainer's.
        capabilities.add("weight_info")
    paused = await _is_paused(calls, notes) if "pause" in capabilities else None
    status, config = await _config(control)
    model_config = _section(config, "model_config")
    kv_dtype = metrics_text.cache_labels(text).get("cache_dtype")
    description = Description(
        slots=slots or _slots(config, status) * cache.engines,
        kv_tokens=cache.kv_tokens,
        max_model_len=max_model_len,
        version=version,
        started_at=metrics_text.started_at(text),
        model=models[0].id,
        capabilities=frozenset(capabilities),
        models=tuple(model.id for model in models) if len(models) > 1 else (),
        paused=paused,
        precision=endpoints.precision(
            model_config.get("quantization"), model_config.get("dtype"), kv_dtype
        ),
    )
    return Findings(description, dialect, abort_path, tuple(notes), calls)


def _dev_capabilities(answers: Sequence[ControlAnswer], notes: list[str]) -> set[str]:
    """Capabilities by the answers of `_DEV_ENDPOINTS` to GET; missing ones are noted."""
    found = set()
    for (capability, (_, note)), answer in zip(_DEV_ENDPOINTS.items(), answers, strict=True):
        if answer.status == 405:  # the path exists, for POST
            found.add(capability)
        else:
            notes.append(note)
    return found


async def _is_paused(calls: EngineCalls, notes: list[str]) -> bool | None:
    paused = await calls.is_paused()
    if paused is None:
        notes.append(
            "does not report whether it is paused, so it is resumed whenever it joins: use it with "
            "one gateway only"
        )
    return paused


async def _all(*probes: Coroutine[Any, Any, ControlAnswer]) -> list[ControlAnswer]:
    """All answers. Waits for all probes, then raises the first error."""
    answers = await asyncio.gather(*probes, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


async def _probe(control: ServerControl, method: str, path: str) -> ControlAnswer:
    """The answer of a path that may be offered. Raises InstanceError if the server fails: a feature
    wrongly noted as missing would stay unused until the instance joins again."""
    answer = await control.send(method, path, {} if method == "POST" else None)
    if answer.status >= 500 and answer.status != NOT_IMPLEMENTED:
        raise refusal(answer.status, answer.body, path)
    return answer


def _dialect(endpoint: Way, probe: ControlAnswer, notes: list[str], *, asks: bool) -> Dialect:
    """`asks`: the server reports weight versions on request."""
    offered = probe.status in (400, 422)
    if endpoint == "generate" and not offered:
        raise refusal(probe.status, probe.body, Generate.target)
    if offered and endpoint != "completions":
        return Generate()
    if endpoint == "auto" and not asks:
        remedy = (
            "start vLLM with --enable-scale-out"
            if probe.status == 403
            else "use a vLLM that has /inference/v1/generate"
        )
        notes.append(
            f"is used by /v1/completions and does not report which weights made a token; {remedy}"
        )
    return Completions(asks)


def _abort_path(probe: ControlAnswer, dev_probe: ControlAnswer, notes: list[str]) -> str | None:
    if dev_probe.status == 405:
        return endpoints.DEV_ABORT
    if probe.status in (400, 422):
        return endpoints.OPEN_ABORT
    notes.append(
        "cannot abort a request and keep its tokens: tokens of an interrupted request that were "
        f"not streamed are lost; start vLLM with --enable-scale-out, or {_DEV_MODE}"
    )
    return None


async def served_models(control: ServerControl) -> list[_Model]:
    """The model, and the adapters that are loaded now. Raises InstanceError."""
    answer = await control.get(endpoints.MODELS)
    if answer.status != 200:
        raise refusal(answer.status, answer.body, endpoints.MODELS)
    models: _Models = decoded(endpoints.MODELS, answer.body, _Models)
    if not models.data:
        raise InstanceError("/v1/models lists no model")
    for model in models.data:
        if model.id != printable(model.id):
            raise InstanceError(f"/v1/models lists an invalid name {printable(model.id, 80)!r}")
    return models.data


async def _metrics(control: ServerControl) -> bytes:
    answer = await control.get(endpoints.METRICS)
    if answer.status != 200:
        raise InstanceError(
            f"/metrics answered {answer.status}; start vLLM without "
            "--disable-log-stats, and let proxies pass /metrics"
        )
    return answer.body


async def _config(control: ServerControl) -> tuple[int, dict[str, Any]]:
    """The status of /server_info, which vLLM answers in development mode only, and the
    configuration in it."""
    path = endpoints.SERVER_INFO
    answer = await control.get(path)
    told = decoded(path, answer.body, dict[str, Any]) if answer.status == 200 else {}
    return answer.status, _section(told, "vllm_config")


def _section(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Empty if it is not there."""
    found = told.get(name)
    return found if isinstance(found, dict) else {}


def _slots(config: Mapping[str, Any], status: int) -> int:
    told = _section(config, "scheduler_config").get("max_num_seqs")
    if isinstance(told, int) and 0 < told <= MAX_SLOTS:
        return told
    raise InstanceError(
        f"it does not report how many sequences it runs at once (/server_info answered "
        f"{status}): give slots, with the value of vLLM's --max-num-seqs, or {_DEV_MODE}"
    )


async def _vllm_version(control: ServerControl) -> tuple[int, ...]:
    """(major, minor); () if it is not reported, which is smaller than any version."""
    answer = await _probe(control, "GET", endpoints.VERSION)
    if answer.status != 200:
        return ()
    told = str(decoded(endpoints.VERSION, answer.body, dict[str, Any]).get("version"))
    parts = told.split(".")[:2]
    known = all(part.isdecimal() and len(part) < 9 for part in parts)
    return tuple(int(part) for part in parts) if known else ()
