"""What must be true of an instance before it joins, and is made true where that is ours to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

import msgspec

from rollout_sched.live.asking import ask
from rollout_sched.live.pause import FIND, RESUME, Pause
from rollout_sched.live.ports import Description, InstanceClient, InstanceError, printable
from rollout_sched.live.settings import Settings


class ServesSeveral(Protocol):
    """A client whose instance names several models (`Description.models`)."""

    def use_model(self, model: str) -> None:
        """What our own requests there are to name."""


def with_the_fleets_model(
    client: InstanceClient, description: Description, others: Iterable[Description]
) -> Description:
    """With the model of `others`, that of the first that joined. Raises InstanceError if it does
    not serve that one: half of the answers would come from another."""
    ours = next((other.model for other in others if other.model), "")
    if ours in ("", description.model) or not description.model:
        return description
    if ours not in description.models:
        serves = printable(", ".join(description.models) or description.model, 120)
        raise InstanceError(
            f"it serves {serves} where the instances here serve {ours}: one gateway serves one "
            f"model, so start it with --served-model-name {ours} if it is the same, or put it "
            "behind a gateway of its own"
        )
    cast(ServesSeveral, client).use_model(ours)
    return msgspec.structs.replace(description, model=ours)


async def settle_pause(
    client: InstanceClient, description: Description, pause: Pause, settings: Settings
) -> None:
    """Paused if it is held, else not. Raises InstanceError if somebody else has paused it: another
    scheduler may be loading weights.

    One that does not say whether it is paused is resumed: whoever paused it may be gone.
    """
    if "pause" not in description.capabilities:
        if pause.held:
            raise InstanceError(
                "it is held, but cannot be paused any more; release it, or start vLLM with "
                "VLLM_SERVER_DEV_MODE=1 in its environment"
            )
    elif pause.held:
        if not description.paused:
            await ask(client.pause("keep", False), settings.control_timeout_s)
    elif description.paused and not (pause.ours or settings.resume_paused):
        pause.move(FIND)
        raise InstanceError(
            "it is paused, and not by us: whoever paused it may be loading weights. It joins once "
            f"it is resumed; if nobody will, as after a crash, POST {client.name}/resume, or let "
            "us resume what we find paused (resume_paused)"
        )
    elif description.paused is not False:
        await ask(client.resume(), settings.control_timeout_s)
    pause.move(RESUME)
