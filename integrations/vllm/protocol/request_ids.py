"""What vLLM calls a request: an id of its own, made of the one that it was given.

Given in the X-Request-Id header, or as `request_id` in the body; told in the answer, and what an
abort must name.
"""

from __future__ import annotations

from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint

#: Of the only prompt of a call (vLLM 0.32).
_ENGINE_ID: dict[Endpoint, str] = {
    "completions": "cmpl-%s-0",
    "chat": "chatcmpl-%s",
    "generate": "generate-tokens-%s",
}


def engine_id(endpoint: Endpoint, request_id: str) -> str:
    """The id under which the engine knows a request, which is what an abort must name."""
    return _ENGINE_ID[endpoint] % request_id


def names_another(told: str, order_id: str) -> bool:
    """Whether an answer's id is made of another order of ours (`<run>-<attempt>`) than this one.

    What a client named the request may stand before the order's id. A server that makes up ids of
    its own is believed.
    """
    run = order_id[: order_id.rfind("-") + 1]
    at = told.rfind(run) if run else -1
    if at < 0:
        return False
    named = told[at:]
    return not named.startswith(order_id) or named[len(order_id) :][:1].isdigit()
