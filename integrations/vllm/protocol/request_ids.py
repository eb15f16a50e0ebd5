"""vLLM's ids of requests, which it makes from the ids that it is given.

The id is given in the X-Request-Id header, or as `request_id` in the body. vLLM's own id is in the
answer, and an abort must name it.
"""

from __future__ import annotations

from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint

#: The engine's id for a call with one prompt (vLLM 0.32).
_ENGINE_ID: dict[Endpoint, str] = {
    "completions": "cmpl-%s-0",
    "chat": "chatcmpl-%s",
    "generate": "generate-tokens-%s",
}


def engine_id(endpoint: Endpoint, request_id: str) -> str:
    """The engine's id of a request, which an abort must name."""
    return _ENGINE_ID[endpoint] % request_id


def names_another(told: str, order_id: str) -> bool:
    """Whether an answer's id is made from another of our orders (`<run>-<attempt>`) than this one.

    The client's own request id may precede the order's id. Ids that a server makes up itself are
    accepted.
    """
    run = order_id[: order_id.rfind("-") + 1]
    at = told.rfind(run) if run else -1
    if at < 0:
        return False
    named = told[at:]
    return not named.startswith(order_id) or named[len(order_id) :][:1].isdigit()
