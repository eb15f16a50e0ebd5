"""SGLang's wire (0.5.23): its paths, its names of sampling parameters, and `/generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollout_sched.core.model.records import Count, Signed
from rollout_sched.integrations.vllm.protocol.answers import Logprob, VersionSpan, decoded
from rollout_sched.integrations.vllm.protocol.endpoints import NEUTRAL_SAMPLING
from rollout_sched.integrations.vllm.protocol.refusals import refusal_of_request
from rollout_sched.live.ports import AnswerUntrue, InstanceError, RequestRejected

GENERATE = "/generate"
ABORT = "/abort_request"
MODEL_INFO = "/model_info"
SERVER_INFO = "/server_info"
LOADS = "/v1/loads?include=core"
READY = "/ready"
PAUSE = "/pause_generation"
RESUME = "/continue_generation"
FLUSH = "/flush_cache"
SET_LABEL = "/update_weight_version"
FROM_DISK = "/update_weights_from_disk"
INIT_GROUP = "/init_weights_update_group"
BEGIN_UPDATE = "/begin_weight_update"
END_UPDATE = "/end_weight_update"

#: The call for an update, by the field that only its body has.
UPDATES = {
    "names": "/update_weights_from_distributed",
    "serialized_named_tensors": "/update_weights_from_tensor",
    "zmq_handles": "/update_weights_from_ipc",
}

#: SGLang's names of vLLM's sampling parameters, as far as they mean the same.
SAMPLING = {
    **{name: name for name in NEUTRAL_SAMPLING},
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "logit_bias": "logit_bias",
    "stream_interval": "stream_interval",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
    "extra_args": "custom_params",
}

#: SGLang's limit of a response if the client sets none.
MAX_NEW_TOKENS = 128

#: Sampling parameters of vLLM that only say how its answer is written.
_NOT_OF_SAMPLING = frozenset({"detokenize", "logprobs", "n", "output_kind", "flat_logprobs"})


def sampling_for_sglang(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's SamplingParams as SGLang's; those that are not given have the same values as there,
    whatever the server prefers. Raises RequestRejected for one that SGLang does not have."""
    told: dict[str, Any] = {}
    for name, value in {**NEUTRAL_SAMPLING, **sampling}.items():
        if value is None or name in _NOT_OF_SAMPLING or (name, value) == ("seed", -1):
            continue
        if name not in SAMPLING:
            raise RequestRejected(f"SGLang has no sampling parameter {name!r}: leave it out")
        told[SAMPLING[name]] = value
    told["top_k"] = told["top_k"] or -1  # which is vLLM's other word for all
    return told


def sampling_for_vllm(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse, for a client's body. Raises RequestRejected."""
    names = {theirs: ours for ours, theirs in SAMPLING.items()}
    told: dict[str, Any] = {}
    for name, value in sampling.items():
        if value is None or (name == "n" and value == 1):
            continue
        if name not in names:
            raise RequestRejected(f"sampling_params: {name!r} is not supported: leave it out")
        told[names[name]] = value
    return told


# ------------------------------------------------------------------------------------------
# The answer of /generate, whole or an event of a stream.


class FinishReason(msgspec.Struct):
    """`type` is "stop", "length" or "abort". With a status, "abort" is an error."""

    type: str
    message: str = ""
    status_code: Signed | None = None


class MetaInfo(msgspec.Struct):
    """`completion_tokens`: those made so far. Each log-prob comes with its token id and text."""

    id: str = ""
    finish_reason: FinishReason | None = None
    completion_tokens: Count | None = None
    output_token_logprobs: list[tuple[Logprob, Count, str | None]] | None = None
    weight_versions: list[VersionSpan] | None = None

    @property
    def versions(self) -> list[VersionSpan]:
        """Without the empty span of an answer that has no token."""
        return [span for span in self.weight_versions or () if span.end > span.start]


class _Error(msgspec.Struct):
    message: str = ""
    code: Signed = 500


class GeneratedAnswer(msgspec.Struct):
    """`output_ids`: of a stream, all so far, or with --incremental-streaming-output the new ones;
    an abort then repeats the last one. `error` stands in place of the others."""

    output_ids: list[Count] | None = None
    meta_info: MetaInfo = msgspec.field(default_factory=MetaInfo)
    error: _Error | None = None


_decoder = msgspec.json.Decoder(GeneratedAnswer)


def read_answer(data: bytes) -> GeneratedAnswer:
    """Raises AnswerUntrue if it is none; RequestRejected or InstanceError for an error."""
    answer = decoded(_decoder.decode, data)
    finish = answer.meta_info.finish_reason
    if answer.error is not None:
        raise _refusal(answer.error.code, answer.error.message)
    if finish is not None and finish.status_code is not None:
        raise _refusal(finish.status_code, finish.message)
    if answer.output_ids is None:
        raise AnswerUntrue("its answer has no output_ids: is it SGLang?")
    named = [token for _, token, _ in answer.meta_info.output_token_logprobs or ()]
    both = min(len(named), len(answer.output_ids))
    if both and named[-both:] != answer.output_ids[-both:]:
        raise AnswerUntrue("its log-probs have other token ids than its answer")
    return answer


def _refusal(status: int, message: str) -> RequestRejected | InstanceError:
    body = msgspec.json.encode({"error": {"message": message}})
    return refusal_of_request(status, body, GENERATE)
