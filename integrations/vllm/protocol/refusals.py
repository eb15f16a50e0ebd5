"""What a status other than 200 means: whose fault it is, and the remedy.

A request is at fault for what its author wrote: its body, and a client's headers that the gateway
passes on. The gateway chooses the path, the method and the key, so a 401, 403, 404 or 405 means
that gateway and instance do not fit together: another instance may accept the request, and a client
that got this status would look for the fault in its own key. A proxy in between that answers 403
because of something in a client's request does so on every instance. By that the request is found
to be at fault (`core.blame`), which costs no instance anything.
"""

from __future__ import annotations

from rollout_sched.live.ports import InstanceError, RequestRejected, printable

#: 400, 413 and 422 are about the body, the others about headers.
_REQUEST_AT_FAULT = frozenset((400, 406, 411, 412, 413, 414, 415, 416, 417, 422, 428, 431))

#: In vLLM's 404 for an unknown model, in contrast to an unknown path.
_NO_SUCH_MODEL = b"NotFoundError"

_REMEDIES = {
    401: "give the API key that vLLM was started with (--api-key)",
    403: "start vLLM with --enable-scale-out",
    404: "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, or use a newer one",
    405: "it is not a vLLM server, or an older one",
}


class AnswerRefused(InstanceError):
    """An answer that cannot be used; `unquoted` is the error text without parts of the answer."""

    def __init__(self, text: str, unquoted: str) -> None:
        super().__init__(text)
        self.unquoted = unquoted


def refusal(status: int, body: bytes, what: str = "it") -> AnswerRefused:
    """The error for a refused control call, where no request can be at fault. `what`: the path or
    server that answered."""
    remedy = _REMEDIES.get(status)
    then = f"; {remedy}" if remedy else ""
    answered = f"{what} answered {status}"
    return AnswerRefused(f"{answered}: {excerpt(body)}{then}", f"{answered}{then}")


def refusal_of_request(
    status: int, body: bytes, what: str = "it", *, names_model: bool = False
) -> AnswerRefused | RequestRejected:
    """The error for a refused request. `names_model`: its author chose the model. Our own requests
    name a model that the instance has."""
    no_model = names_model and status == 404 and _NO_SUCH_MODEL in body
    if no_model or status in _REQUEST_AT_FAULT:
        answered = f"{what} answered {status}"
        text = f"{answered}: {excerpt(body)}"
        return RequestRejected(text, status, body, unquoted=answered)
    return refusal(status, body, what)


def excerpt(body: bytes) -> str:
    """The beginning of an answer, printable on one line."""
    return printable(body[:300].decode(errors="replace"), 200)
