"""How a trainer says where new weights are."""

from __future__ import annotations

from typing import TypeGuard

import msgspec

from rollout_sched.integrations.gateway.control_plane.weight_update import (
    Reload,
    Transfer,
    WeightUpdate,
)
from rollout_sched.live.ports import WeightLoader


class Applied(msgspec.Struct, frozen=True):
    """The trainer has loaded the weights into every instance itself."""


#: How an instance gets new weights: by description, or (in process) by a coroutine function
#: `apply(client, version)`.
Apply = Reload | Transfer | Applied | WeightLoader


def is_coroutine(apply: Apply) -> TypeGuard[WeightLoader]:
    return not isinstance(apply, Reload | Transfer | Applied)


def update_of(version: int, apply: Apply) -> WeightUpdate:
    """What a description says, as a message."""
    if isinstance(apply, Reload):
        return WeightUpdate(version, reload=apply)
    if isinstance(apply, Transfer):
        return WeightUpdate(version, transfer=apply)
    return WeightUpdate(version, applied=True)
