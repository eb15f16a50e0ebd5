"""control_plane"""

from rollout_sched.integrations.gateway.control_plane import weights
from rollout_sched.integrations.gateway.control_plane.auth import read_keys
from rollout_sched.integrations.gateway.control_plane.codec import MSGPACK
from rollout_sched.integrations.gateway.control_plane.gateway import NewInstance
from rollout_sched.integrations.gateway.control_plane.trainer_api import EPOCH, NextBatch
from rollout_sched.integrations.gateway.control_plane.trainer_client import (
    STATE,
    GatewayError,
    TrainerCalls,
    TrainerClient,
    error_of,
)

__all__ = [
    "EPOCH",
    "MSGPACK",
    "STATE",
    "GatewayError",
    "NewInstance",
    "NextBatch",
    "TrainerCalls",
    "TrainerClient",
    "error_of",
    "read_keys",
    "weights",
]
