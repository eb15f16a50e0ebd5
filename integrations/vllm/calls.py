"""What an instance is asked for beyond generating: one object for each engine's words.

`EngineCalls` is what a client over HTTP needs of it; `VllmCalls` are vLLM's
(`integrations.sglang` has SGLang's).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec

from rollout_sched.core.model.records import Count
from rollout_sched.integrations.vllm import metrics_text
from rollout_sched.integrations.vllm.control import ServerControl, decoded
from rollout_sched.integrations.vllm.protocol import endpoints
from rollout_sched.integrations.vllm.protocol.answers import version_of
from rollout_sched.integrations.vllm.protocol.refusals import AnswerRefused, refusal
from rollout_sched.integrations.vllm.weights import MAX_RANKS
from rollout_sched.live.ports import Gauges, InstanceError


class EngineLimits(msgspec.Struct, frozen=True):
    """Settings of an engine beyond what a scheduler needs, as far as the server reports them. None
    for what is not reported; sizes in tokens.

    block_size              block size of the KV cache
    prefix_caching          whether prefix caching is on
    max_num_batched_tokens  the most tokens of one step
    version                 the engine's version
    """

    block_size: int | None = None
    prefix_caching: bool | None = None
    max_num_batched_tokens: int | None = None
    version: str | None = None


class EngineCalls(Protocol):
    """Calls to one server. Each may raise InstanceError; limits are in seconds.

    The methods without a docstring are those of `live.ports.InstanceClient`, and of
    `integrations.vllm.weights.WeightClient`.
    """

    #: Whether it takes OpenAI's bodies as vLLM does, so that clients' calls can be passed on.
    takes_openai: bool

    async def abort(self, engine_ids: list[str]) -> None:
        """Of at least one request, by the engine's ids."""

    async def tokenize(self, model: str, text: str) -> list[int] | None:
        """Token ids of a text; None if it cannot be asked."""

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str | None: ...
    async def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None: ...
    async def resume(self) -> None: ...
    async def set_version(self, version: int) -> None: ...
    async def weight_version(self) -> int | None: ...
    async def is_paused(self) -> bool | None: ...
    async def gauges(self) -> Gauges: ...
    async def limits(self) -> EngineLimits: ...
    async def collective_rpc(
        self, method: str, kwargs: Mapping[str, Any], limit_s: float | None
    ) -> None: ...
    async def weight_transfer(
        self, step: str, body: Mapping[str, Any], limit_s: float | None
    ) -> None: ...
    async def world_size(self) -> int: ...


class _WorldSize(msgspec.Struct):
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]


class _Text(msgspec.Struct):
    prompt: str


class _Tokens(msgspec.Struct):
    tokens: list[Count]


async def tokenized(control: ServerControl, model: str, text: str) -> list[int] | None:
    """By /tokenize, which both engines have."""
    path = endpoints.TOKENIZE
    try:
        answer = await control.call(path, {"model": model, "prompt": text}, throttled=False)
    except AnswerRefused:
        return None
    token_ids: list[int] = decoded(path, answer, _Tokens).tokens
    return token_ids


class VllmCalls:
    """`abort_path`: where requests are aborted; None if nowhere."""

    takes_openai = True

    def __init__(self, control: ServerControl, abort_path: str | None = None) -> None:
        self._control = control
        self._abort_path = abort_path

    async def abort(self, engine_ids: list[str]) -> None:
        assert self._abort_path is not None
        await self._control.call(self._abort_path, {"request_ids": engine_ids}, throttled=False)

    async def tokenize(self, model: str, text: str) -> list[int] | None:
        return await tokenized(self._control, model, text)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str | None:
        body, path = {"model": model, "tokens": [*token_ids]}, endpoints.DETOKENIZE
        try:
            answer = await self._control.call(path, body, throttled=False)
        except AnswerRefused:
            return None
        text: str = decoded(path, answer, _Text).prompt
        return text

    async def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        # clear_cache is true by default, which drops the KV of running requests even with "keep".
        query = {"mode": mode, "clear_cache": "true" if clear_cache else "false"}
        await self._control.call(endpoints.PAUSE, query=query)

    async def resume(self) -> None:
        await self._control.call(endpoints.RESUME)

    async def set_version(self, version: int) -> None:
        await self._control.call(endpoints.SET_LABEL, {"new_version": str(version)})

    async def weight_version(self) -> int | None:
        """The policy version of its label; None if the label is not a version, or is not
        reported."""
        path = endpoints.WEIGHT_INFO
        answer = await self._control.get(path)
        if answer.status >= 500 and answer.status != NOT_IMPLEMENTED:
            raise refusal(answer.status, answer.body, path)
        if answer.status != 200:
            return None
        return version_of(decoded(path, answer.body, dict[str, Any]).get("weight_version"))

    async def is_paused(self) -> bool | None:
        answer = await self._control.get(endpoints.IS_PAUSED)
        if answer.status != 200:
            return None
        told = decoded(endpoints.IS_PAUSED, answer.body, dict[str, Any]).get("is_paused")
        return told if isinstance(told, bool) else None

    async def gauges(self) -> Gauges:
        answer = await self._control.get(endpoints.METRICS)
        if answer.status != 200:
            raise refusal(answer.status, answer.body, endpoints.METRICS)
        return metrics_text.gauges(answer.body)

    async def limits(self) -> EngineLimits:
        """From /metrics, /version and, in development mode, /server_info."""
        metrics = await self._control.get(endpoints.METRICS)
        labels = metrics_text.cache_labels(metrics.body) if metrics.status == 200 else {}
        block_size, caching = labels.get("block_size", ""), labels.get("enable_prefix_caching", "")
        info = await reported(self._control, endpoints.SERVER_INFO)
        config = info.get("vllm_config")
        scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
        tokens = scheduler.get("max_num_batched_tokens") if isinstance(scheduler, dict) else None
        version = (await reported(self._control, endpoints.VERSION)).get("version")
        return EngineLimits(
            int(block_size) if block_size.isdecimal() and 0 < len(block_size) < 9 else None,
            {"True": True, "False": False}.get(caching),
            tokens if isinstance(tokens, int) and tokens > 0 else None,
            version if isinstance(version, str) else None,
        )

    async def collective_rpc(
        self, method: str, kwargs: Mapping[str, Any], limit_s: float | None
    ) -> None:
        body = {"method": method, "kwargs": kwargs}
        await self._control.call(endpoints.COLLECTIVE_RPC, body, repeatable=False, limit_s=limit_s)

    async def weight_transfer(
        self, step: str, body: Mapping[str, Any], limit_s: float | None
    ) -> None:
        await self._control.call(f"/{step}", body, repeatable=False, limit_s=limit_s)

    async def world_size(self) -> int:
        answer = await self._control.get(endpoints.WORLD_SIZE)
        if answer.status != 200:
            raise InstanceError(
                f"it does not report its number of ranks ({endpoints.WORLD_SIZE} answered "
                f"{answer.status}): start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        told: _WorldSize = decoded(endpoints.WORLD_SIZE, answer.body, _WorldSize)
        return told.world_size


#: The only status from 500 on that means that a path is not offered.
NOT_IMPLEMENTED = 501


async def reported(control: ServerControl, path: str) -> dict[str, Any]:
    """The JSON object that a path answers with; empty if it has none."""
    answer = await control.get(path)
    told: dict[str, Any] = {}
    if answer.status == 200:
        told = decoded(path, answer.body, dict[str, Any])
    return told
