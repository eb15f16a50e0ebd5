"""Calls to a gateway in another process: their messages, their transport, and the client."""

from rollout_sched.client.remote.calls import (
    EPOCH,
    MSGPACK,
    STATE,
    GatewayError,
    NextBatch,
    Renewal,
    SubmissionAnswer,
    TrainerCalls,
    TrainerClient,
    error_of,
)
from rollout_sched.client.remote.client import LONG_POLL_S, ForgottenPrompts, Remote

__all__ = [
    "EPOCH",
    "LONG_POLL_S",
    "MSGPACK",
    "STATE",
    "ForgottenPrompts",
    "GatewayError",
    "NextBatch",
    "Remote",
    "Renewal",
    "SubmissionAnswer",
    "TrainerCalls",
    "TrainerClient",
    "error_of",
]
