"""What a status other than 200 means: whose fault it is, and the remedy.

A request is at fault for what its author wrote: its body, and a client's headers that the gateway
passes on. The gateway chooses the path, the method and the key, so a 401, 403, 404 or 405 means
that gateway and instance do not fit together: another instance may accept the request, and a client
that got this status would look for the fault in its own key. A proxy in between that answers 403
because of something in a client's request does so on every instance. By that the request is found
to be at fault (`core.work.attempts`), which costs no instance anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rollout_sched.live.ports import (
    EnginePaused,
    InstanceError,
    RequestRejected,
    RequestTooLong,
    printable,
)

#: 400, 413 and 422 are about the body, the others about headers.
_REQUEST_AT_FAULT = frozenset((400, 406, 411, 412, 413, 414, 415, 416, 417, 422, 428, 431))

#: In vLLM's 404 for an unknown model, in contrast to an unknown path.
_NO_SUCH_MODEL = b"NotFoundError"

#: Begins the message of a vLLM server (0.33 and later) that was paused by "abort" or "wait" and
#: refuses new requests: with status 503, or as the only event of a stream.
_PAUSED = "Generation is paused."

#: In vLLM's 400 for a request that is longer than its --max-model-len.
_TOO_LONG = (b"maximum context length", b"max_model_len", b"max_total_tokens")

#: What to do at a vLLM server, by status.
REMEDIES = {
    401: "give the API key that vLLM was started with (--api-key)",
    403: "start vLLM with --enable-scale-out",
    404: "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, or use a newer one",
    405: "it is not a vLLM server, or an older one",
}


class _Error(msgspec.Struct):
    message: str = ""


class _Refused(msgspec.Struct):
    """vLLM's body of an error."""

    error: _Error


class AnswerRefused(InstanceError):
    """An answer that cannot be used."""


def refusal(
    status: int, body: bytes, what: str = "it", remedies: Mapping[int, str] = REMEDIES
) -> AnswerRefused:
    """The error for a refused control call, where no request can be at fault. `what`: the path or
    server that answered."""
    remedy = remedies.get(status)
    then = f"; {remedy}" if remedy else ""
    answered = f"{what} answered {status}"
    return AnswerRefused(f"{answered}: {excerpt(body)}{then}", unquoted=f"{answered}{then}")


def refusal_of_request(
    status: int, body: bytes, what: str = "it", *, serves: Sequence[str] | None = None
) -> InstanceError | RequestRejected:
    """The error for a refused request. `serves`: the models that the instance had when it joined,
    if the request's author chose one; None: it is our own request, which names one of them."""
    answered = f"{what} answered {status}"
    if status == 503 and says_paused(body):
        return EnginePaused(f"{answered}: it is paused")
    at_fault = status in _REQUEST_AT_FAULT
    if serves is not None and status == 404 and _NO_SUCH_MODEL in body:
        model = _missing_model(body)
        if model and model in serves:
            text = f"{answered}: it no longer serves {model}; was it restarted with another model?"
            return AnswerRefused(text)
        at_fault = True
    if at_fault:
        text = f"{answered}: {excerpt(body)}"
        too_long = status == 400 and any(words in body for words in _TOO_LONG)
        return (RequestTooLong if too_long else RequestRejected)(
            text, status, body, unquoted=answered
        )
    return refusal(status, body, what)


def _missing_model(body: bytes) -> str:
    """The name in vLLM's "The model `x` does not exist."; "" if the message is another. The whole
    message is compared, because the client chose the name."""
    message = _message(body)
    name = message.removeprefix("The model `").removesuffix("` does not exist.")
    return name if message == f"The model `{name}` does not exist." else ""


def says_paused(body: bytes) -> bool:
    """Whether an error says that the engine is paused."""
    return _message(body).startswith(_PAUSED)


def _message(body: bytes) -> str:
    """The message of vLLM's body of an error; "" if it is something else."""
    try:
        return msgspec.json.decode(body, type=_Refused).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def excerpt(body: bytes) -> str:
    """The beginning of an answer, printable on one line."""
    return printable(body[:300].decode(errors="replace"), 200)
