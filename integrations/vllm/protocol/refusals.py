"""What a status other than 200 means: whose fault it is, and what to do about it.

A request is at fault for what its author wrote: its body, and the headers of a client that the
gateway passes on. Where it goes, how, and with which key is ours to say, so a 401, 403, 404 or 405
says that the instance and we do not agree: another instance may, and a client that was told so
would look for the fault in its own key. A proxy in between that dislikes something of a client's
and answers 403 does so on every instance, and by that the request is found out (`core.blame`),
which costs no instance anything.
"""

from __future__ import annotations

from rollout_sched.live.ports import InstanceError, RequestRejected, printable

#: Judgements of the body: 400, 413, 422; the others are of headers.
_REQUEST_AT_FAULT = frozenset((400, 406, 411, 412, 413, 414, 415, 416, 417, 422, 428, 431))

#: In vLLM's 404 where it has no such model, in contrast to no such path.
_NO_SUCH_MODEL = b"NotFoundError"

_REMEDIES = {
    401: "give the API key that vLLM was started with (--api-key)",
    403: "start vLLM with --enable-scale-out",
    404: "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, or use a newer one",
    405: "it is no vLLM server, or an older one",
}


class AnswerRefused(InstanceError):
    """An answer that is of no use; `unquoted` says so without a word of it."""

    def __init__(self, text: str, unquoted: str) -> None:
        super().__init__(text)
        self.unquoted = unquoted


def refusal(status: int, body: bytes, what: str = "it") -> AnswerRefused:
    """An answer to a call of ours, for which no request can be at fault. `what`: who answered."""
    remedy = _REMEDIES.get(status)
    then = f"; {remedy}" if remedy else ""
    answered = f"{what} answered {status}"
    return AnswerRefused(f"{answered}: {excerpt(body)}{then}", f"{answered}{then}")


def refusal_of_request(
    status: int, body: bytes, what: str = "it", *, names_model: bool = False
) -> AnswerRefused | RequestRejected:
    """An answer to a request. `names_model`: its author did, not we, who ask for what is there."""
    no_model = names_model and status == 404 and _NO_SUCH_MODEL in body
    if no_model or status in _REQUEST_AT_FAULT:
        answered = f"{what} answered {status}"
        text = f"{answered}: {excerpt(body)}"
        return RequestRejected(text, status, body, unquoted=answered)
    return refusal(status, body, what)


def excerpt(body: bytes) -> str:
    """The beginning of an answer, as it can stand in a line."""
    return printable(body[:300].decode(errors="replace"), 200)
