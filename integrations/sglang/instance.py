"""An instance of either engine: the server is asked which it is whenever it is described."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from rollout_sched.integrations.sglang.calls import SglangCalls
from rollout_sched.integrations.sglang.protocol import GENERATE, read_answer, sampling_for_sglang
from rollout_sched.integrations.vllm import (
    Chunk,
    Dialect,
    Findings,
    HttpInstance,
    served_models,
)
from rollout_sched.integrations.vllm.protocol.answers import version_of
from rollout_sched.integrations.vllm.protocol.endpoints import precision
from rollout_sched.live.ports import Description, InstanceError, Order

_CAPABILITIES = frozenset(
    {
        *("generate", "abort", "pause", "set_version", "weight_info", "weight_versions"),
        *("collective_rpc", "weight_transfer"),
    }
)


#: The version that our facts are from.
_KNOWN = [0, 5, 23]


class SglangGenerate(Dialect):
    """`POST /generate`."""

    target = GENERATE
    capability = "generate"

    def engine_id(self, order_id: str) -> str:
        """SGLang's scheduler aborts every request whose id begins with that of an abort: with its
        last character no id of ours begins with another."""
        return f"{order_id}."

    def _request(self, order: Order, sampling: dict[str, Any], model: str) -> dict[str, Any]:
        request: dict[str, Any] = {
            "rid": self.engine_id(order.id),
            "input_ids": order.token_ids,
            "sampling_params": sampling_for_sglang(sampling),
            "return_logprob": order.sampling.get("logprobs") is not None,
            "stream": order.stream_every > 0,
        }
        if order.salt:
            request["cache_salt"] = order.salt
        return request

    def read(self, data: bytes) -> Chunk:
        answer = read_answer(data)
        told = answer.meta_info
        assert answer.output_ids is not None  # checked by read_answer
        logprobs = None
        if told.output_token_logprobs is not None:
            logprobs = [logprob for logprob, _, _ in told.output_token_logprobs]
        finish = None if told.finish_reason is None else told.finish_reason.type
        made = len(answer.output_ids) if told.completion_tokens is None else told.completion_tokens
        ids = answer.output_ids
        return Chunk(ids, logprobs, finish, told.versions, told.id, made, repeats=True)


class EngineInstance(HttpInstance):
    """A server of vLLM or SGLang; the settings are those of `HttpInstance`.

    `engines`: of the instances that have to have one engine, filled by the first that answers.
    """

    def __init__(self, url: str, *, engines: set[str] | None = None, **settings: Any) -> None:
        super().__init__(url, **settings)
        sizes = settings.get("slots"), settings.get("kv_tokens")
        sglang = SglangCalls(self.control)  # one for all descriptions: it notices restarts
        self._engines = engines
        self._detect = partial(described, sglang, self._detect, *sizes)

    async def describe(self) -> Description:
        """Raises InstanceError also if it is of another engine than the others: calls of clients
        are passed on as they are, and each engine takes its own."""
        description = await super().describe()
        engine = "vLLM" if self.takes_openai else "SGLang"
        if self._engines is not None:
            others = self._engines or {engine}
            self._engines |= others
            if engine not in others:
                raise InstanceError(
                    f"it is {engine}, and the other instances are {''.join(others)}: one "
                    "gateway takes one engine; start another gateway for this one"
                )
        return description


async def described(
    calls: SglangCalls,
    as_vllm: Callable[[], Coroutine[Any, Any, Findings]],
    slots: int | None,
    kv_tokens: int | None,
) -> Findings:
    """What a server is: SGLang if it answers what SGLang alone is asked, else as vLLM. Raises
    InstanceError. `slots` and `kv_tokens` override what it reports."""
    model = await calls.model_info()
    if model is None:
        return await as_vllm()
    info, loads = await calls.server_info(), await calls.loads()
    served = await served_models(calls.control)
    longest = max(card.max_model_len or 0 for card in served)  # none for an adapter
    if not longest:
        raise InstanceError("/v1/models does not report max_model_len")
    description = Description(
        slots=slots or sum(load.max_running_requests for load in loads),
        kv_tokens=kv_tokens or sum(load.max_total_num_tokens for load in loads),
        max_model_len=longest,
        version=version_of(model.weight_version),
        started_at=calls.started_at,
        model=served[0].id,
        capabilities=_CAPABILITIES,
        models=tuple(card.id for card in served) if len(served) > 1 else (),
        paused=await calls.is_paused(),
        precision=precision(info.quantization, info.dtype, info.kv_cache_dtype),
    )
    notes = ["is SGLang: clients reach it by /generate, not by OpenAI's paths"]
    version = [int(part) for part in info.version.split(".")[:3] if part.isdecimal()]
    if version < _KNOWN:
        notes.append(f"is SGLang {info.version or 'of no version'}; 0.5.23 is what we know")
    return Findings(description, SglangGenerate(), GENERATE, tuple(notes), calls)
