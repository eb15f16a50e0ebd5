"""SGLang's endpoints besides `/generate` (`integrations.vllm.calls.EngineCalls`).

SGLang's defaults would end requests or empty the cache in calls that are about something else, so
every such field is sent: `abort_all_requests` of a new label, `flush_cache` of new weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from rollout_sched.core.model.records import Count, Serial
from rollout_sched.integrations.sglang import protocol
from rollout_sched.integrations.vllm import EngineLimits, ServerControl, tokenized
from rollout_sched.integrations.vllm.protocol import endpoints as vllm
from rollout_sched.integrations.vllm.protocol.answers import LABEL_OF_A_START, version_of
from rollout_sched.integrations.vllm.protocol.refusals import AnswerRefused, refusal
from rollout_sched.live.ports import Gauges, InstanceError

#: Seconds for the last requests to leave the engine before its cache is flushed.
_FLUSH_S = 10


class ModelInfo(msgspec.Struct):
    """`/model_info`, which no other engine has."""

    model_path: str
    weight_version: str
    served_model_name: str = ""


class ServerInfo(msgspec.Struct):
    version: str = ""
    tp_size: Count = 1
    pp_size: Count = 1
    page_size: Count | None = None
    chunked_prefill_size: int | None = None
    disable_radix_cache: bool = False
    quantization: str | None = None
    dtype: str = ""
    kv_cache_dtype: str = ""


class Load(msgspec.Struct):
    """Of one data-parallel rank; `total_prefill_uncached_tokens` counts since its start."""

    num_running_reqs: Count
    num_waiting_reqs: Count
    num_used_tokens: Serial
    max_total_num_tokens: Serial
    max_running_requests: Count
    total_prefill_uncached_tokens: Serial = 0


class _Loads(msgspec.Struct):
    loads: list[Load]


class _Text(msgspec.Struct):
    text: str


class SglangCalls:
    """`started_at`: SGLang does not report when it was started. This is when we first saw it, and
    changes when a counter or the label shows that it was restarted."""

    takes_openai = False

    def __init__(self, control: ServerControl) -> None:
        self.control = control
        self._prefilled = 0
        self._labelled = False
        self._updating = False  # between its begin and its end of an update
        self._draft = False
        self.started_at = time.time()

    # -- what it is ------------------------------------------------------------------------

    async def model_info(self) -> ModelInfo | None:
        """None if the server is not SGLang."""
        answer = await self.control.get(protocol.MODEL_INFO)
        if answer.status != 200:
            return None
        try:
            return msgspec.json.decode(answer.body, type=ModelInfo)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    async def server_info(self) -> ServerInfo:
        told: ServerInfo = await self._get(protocol.SERVER_INFO, ServerInfo)
        return told

    async def limits(self) -> EngineLimits:
        told = await self.server_info()
        step = told.chunked_prefill_size
        return EngineLimits(
            told.page_size,
            not told.disable_radix_cache,
            step if step is not None and step > 0 else None,
            told.version or None,
        )

    async def world_size(self) -> int:
        told = await self.server_info()
        return int(told.tp_size * told.pp_size)

    async def loads(self) -> list[Load]:
        """Of each data-parallel rank. Raises InstanceError if it has reported none yet."""
        loads: list[Load] = (await self._get(protocol.LOADS, _Loads)).loads
        if not loads:
            raise InstanceError(f"{protocol.LOADS} reports no load yet")
        prefilled = sum(load.total_prefill_uncached_tokens for load in loads)
        if prefilled < self._prefilled:
            self._restarted()
        self._prefilled = prefilled
        return loads

    async def gauges(self) -> Gauges:
        loads = await self.loads()
        used = sum(load.num_used_tokens for load in loads)
        return Gauges(
            sum(load.num_running_reqs for load in loads),
            sum(load.num_waiting_reqs for load in loads),
            min(1.0, used / max(1, sum(load.max_total_num_tokens for load in loads))),
            prefill_tokens=self._prefilled,
            started_at=self.started_at,
        )

    def _restarted(self) -> None:
        self.started_at = time.time()
        self._labelled = self._updating = False

    # -- requests --------------------------------------------------------------------------

    async def abort(self, engine_ids: list[str]) -> None:
        for rid in engine_ids:
            await self._post(protocol.ABORT, {"rid": rid}, throttled=False)

    async def tokenize(self, model: str, text: str) -> list[int] | None:
        return await tokenized(self.control, model, text)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str | None:
        # With the special tokens, as vLLM answers: stop strings may contain them.
        body = {"model": model, "tokens": [*token_ids], "skip_special_tokens": False}
        try:
            told = await self.control.call(vllm.DETOKENIZE, body, throttled=False)
        except AnswerRefused:
            return None
        return str(_read(vllm.DETOKENIZE, told, _Text).text)

    # -- pauses ----------------------------------------------------------------------------

    async def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        """To keep requests without their KV is SGLang's "retract": they are computed again in
        place. The KV of requests that stand still in place cannot be flushed."""
        theirs = "abort" if mode == "abort" else "retract" if clear_cache else "in_place"
        await self._post(protocol.PAUSE, {"mode": theirs})
        if clear_cache:
            await self._post(f"{protocol.FLUSH}?timeout={_FLUSH_S}", {})

    async def resume(self) -> None:
        await self._post(protocol.RESUME, {})

    async def is_paused(self) -> bool | None:
        """A server that is not healthy says the same as one that is paused."""
        answer = await self.control.get(protocol.READY)
        return {200: False, 503: True}.get(answer.status)

    # -- weights ---------------------------------------------------------------------------

    async def weight_version(self) -> int | None:
        told = await self.model_info()
        label = None if told is None else told.weight_version
        if label == LABEL_OF_A_START and self._labelled:
            self._restarted()
        return version_of(label)

    async def set_version(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._post(protocol.SET_LABEL, body)
        self._labelled = True

    async def collective_rpc(
        self, method: str, kwargs: Mapping[str, Any], limit_s: float | None
    ) -> None:
        """Only vLLM's `reload_weights`, which is an endpoint here."""
        if method != "reload_weights":
            raise InstanceError(f"SGLang has no method {method!r} of its workers to call")
        body = {"model_path": kwargs["weights_path"], "abort_all_requests": False}
        await self._change(protocol.FROM_DISK, {**body, "flush_cache": False}, limit_s)

    async def weight_transfer(
        self, step: str, body: Mapping[str, Any], limit_s: float | None
    ) -> None:
        """A step of vLLM's, as SGLang's calls: `init_info` and `update_info` have the fields of
        those. Weights by IPC need no begin, which would pack them again at its end."""
        if step == vllm.INIT_TRANSFER:
            if body["init_info"]:
                await self._change(protocol.INIT_GROUP, body["init_info"], limit_s)
        elif step == vllm.UPDATE_WEIGHTS:
            await self._update(body["update_info"], limit_s)
        elif step == vllm.FINISH_UPDATE:
            if self._updating:
                await self._change(protocol.END_UPDATE, {}, limit_s)
            self._updating = False
        else:
            self._draft = step == vllm.START_DRAFT_UPDATE

    async def _update(self, info: Mapping[str, Any], limit_s: float | None) -> None:
        path = next((path for field, path in protocol.UPDATES.items() if field in info), None)
        if path is None:
            fields = ", ".join(protocol.UPDATES)
            raise InstanceError(f"update_info for SGLang needs one of the fields {fields}")
        own: dict[str, Any] = {"flush_cache": False}
        if "zmq_handles" not in info:
            which = {"selector": "draft"} if self._draft else {}
            own |= {"abort_all_requests": False, **which}
            if not self._updating:
                await self._change(protocol.BEGIN_UPDATE, which, limit_s)
                self._updating = True
        await self._change(path, {**own, **info}, limit_s)

    # -- calls -----------------------------------------------------------------------------

    async def _get(self, path: str, type_: type[Any]) -> Any:
        answer = await self.control.get(path)
        if answer.status != 200:
            raise refusal(answer.status, answer.body, path, _REMEDIES)
        return _read(path, answer.body, type_)

    async def _post(self, path: str, body: Any, *, throttled: bool = True) -> None:
        await self.control.call(path, body, throttled=throttled, remedies=_REMEDIES)

    async def _change(self, path: str, body: Any, limit_s: float | None) -> None:
        """Change weights; never repeated."""
        await self.control.call(path, body, repeatable=False, limit_s=limit_s, remedies=_REMEDIES)


_KEY = "give the API key that SGLang was started with: --admin-api-key, or else --api-key"
_REMEDIES = {401: _KEY, 403: _KEY, 404: "use SGLang 0.5.23 or newer"}


def _read(path: str, body: bytes, type_: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AnswerRefused(
            f"{path} gave an unexpected answer ({error})",
            unquoted=f"{path} gave an unexpected answer: is it SGLang 0.5.23?",
        ) from error
