"""Which requests an instance accepts, and at which token they end."""

from __future__ import annotations

from rollout_sched.simulators.instance.sim_request import Reason, SimRequest
from rollout_sched.simulators.instance.spec import InstanceSpec


def last_token(request: SimRequest, spec: InstanceSpec) -> tuple[int, Reason]:
    """Tokens at the end of a request, and the reason why it ends there. Raises ValueError with the
    limit if it can never run."""
    context, wanted, most = request.context_tokens, request.new_tokens, request.max_new_tokens
    if context < 1 or wanted < 1 or most < 1:
        raise ValueError(
            f"attempt {request.attempt}: context_tokens ({context}), new_tokens ({wanted}) and "
            f"max_new_tokens ({most}) must be >= 1"
        )
    if not (0 <= request.shared_tokens <= context and 0 <= request.known_tokens <= context):
        raise ValueError(
            f"attempt {request.attempt}: shared_tokens ({request.shared_tokens}) and known_tokens "
            f"({request.known_tokens}) must lie within context_tokens ({context})"
        )
    room = min(most, spec.max_model_len - context)
    if room < 1:
        raise ValueError(
            f"attempt {request.attempt}: a context of {context} tokens leaves no new token "
            f"within max_model_len {spec.max_model_len}; raise max_model_len or cut the context"
        )
    new = min(wanted, room)
    blocks = -(-(context + new - 1) // spec.block_size)  # the last token's KV is never written
    if blocks > spec.kv_blocks:
        raise ValueError(
            f"attempt {request.attempt}: {context} + {new} tokens need {blocks} blocks of "
            f"{spec.block_size}, but the instance has {spec.kv_blocks}; raise kv_blocks or lower "
            f"max_new_tokens"
        )
    return context + new, "stop" if new == wanted else "length"
