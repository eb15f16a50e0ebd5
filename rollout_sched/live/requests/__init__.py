"""Requests and their running attempts: payloads, transcripts, tools."""

from rollout_sched.live.requests import continuation, token_payload
from rollout_sched.live.requests.answers import Settle, Verdict
from rollout_sched.live.requests.attempt import LiveAttempt
from rollout_sched.live.requests.attempts import (
    OVERTAKEN_S,
    RunningAttempts,
    blame_of,
    suspicion_of,
)
from rollout_sched.live.requests.payloads import OF_GROUP, PayloadFactory, Payloads, drop
from rollout_sched.live.requests.trajectories import Tool, Trajectory

__all__ = [
    "OF_GROUP",
    "OVERTAKEN_S",
    "LiveAttempt",
    "PayloadFactory",
    "Payloads",
    "RunningAttempts",
    "Settle",
    "Tool",
    "Trajectory",
    "Verdict",
    "blame_of",
    "continuation",
    "drop",
    "suspicion_of",
    "token_payload",
]
