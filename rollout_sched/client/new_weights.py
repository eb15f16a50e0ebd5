"""Descriptions of new weights: how each instance gets them."""

from __future__ import annotations

from typing import TypeGuard

import msgspec

from rollout_sched.integrations.gateway.control_plane.weights import Reload, Transfer, WeightUpdate
from rollout_sched.live.ports import WeightLoader


class Applied(msgspec.Struct, frozen=True):
    """The trainer itself has loaded the weights into every instance."""


#: How an instance gets new weights: by description, or (in process) by a coroutine function
#: `apply(client, version)`.
Apply = Reload | Transfer | Applied | WeightLoader


def is_coroutine(apply: Apply) -> TypeGuard[WeightLoader]:
    return not isinstance(apply, Reload | Transfer | Applied)


def update_of(version: int, apply: Apply) -> WeightUpdate:
    """The message to the gateway for a description."""
    if isinstance(apply, Reload):
        return WeightUpdate(version, reload=apply)
    if isinstance(apply, Transfer):
        return WeightUpdate(version, transfer=apply)
    return WeightUpdate(version, applied=True)
