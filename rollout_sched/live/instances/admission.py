"""Checks that an instance may join the fleet, and prepares it where we can.

The fleet's model is that of the instances that have joined, also while they are away: an instance
with another model stays away until they come back with that model, too, or are removed. If only
present instances counted, one with another model could join while all others are away, and the run
would mix two models. From the trainer's first prompt on, the run's model is that of the instance
that joined last, and is stored: a fleet that comes back whole with another model stays away. A
model is known by its served name, because a server reports nothing else of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import msgspec

from rollout_sched.live.instances.instance import FOUND_PAUSED, FleetInstance
from rollout_sched.live.instances.membership import MembershipMove, MembershipState
from rollout_sched.live.instances.pause import FIND, RESTART, RESUME, InstancePause
from rollout_sched.live.ports import (
    Description,
    InstanceClient,
    InstanceError,
    error_line,
    printable,
    with_timeout,
)
from rollout_sched.live.settings import Settings

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------
# Decides with which version an instance joins, from its own report and the trainer's version.


class VersionRefused(InstanceError):
    """An instance must not serve with its current weights."""


class JoinsLater(InstanceError):
    """Nothing is wrong with the instance: it joins when what it waits for is available."""


class JoiningVersion:
    """The joining version of one instance, over its restarts.

    A version that the instance reports was set since it started, so it is trusted. An instance that
    reports none has its start weights. They are the trainer's first weights if the instance
    reported no version when it was first seen, or if the trainer started at version 0; otherwise
    they are unknown and must not serve.
    """

    def __init__(self, name: str, first: int) -> None:
        self._name = name
        self._first = first
        self._seen = False
        self._of_start: int | None = None  # the version of the weights it is started with

    def settle(self, told: int | None, newest: int, *, follows: bool, can_load: bool) -> int:
        """The version to join with. Raises VersionRefused if it is newer than the trainer's, and
        JoinsLater if it is older and nothing can load the newest.

        told      the version that it reports; None if it reports none
        newest    the trainer's version
        follows   a newer version becomes the trainer's version
        can_load  the newest version can be loaded before it serves
        """
        self._see(told)
        version = self._of_start if told is None else told
        if version is not None and version > newest and not follows:
            raise VersionRefused(_newer(version, newest))
        if version is not None and version >= newest:
            return version
        if can_load:
            return self._first if version is None else version
        raise JoinsLater(_older(version, newest))

    def _see(self, told: int | None) -> None:
        if self._seen:
            return
        self._seen = True
        # A trainer at version 0 has trained nothing: it has the instances' start weights.
        if told is None or self._first == 0:
            self._of_start = self._first
        if told is None:
            log.log(
                logging.WARNING if self._first else logging.INFO,
                "instance %s does not report the version of its weights: assuming %d, the "
                "trainer's version at its start; if that is wrong, label them "
                "(POST /update_weight_version) before it joins",
                self._name,
                self._first,
            )


def _newer(version: int, newest: int) -> str:
    return (
        f"it reports weights of version {version}, but the trainer is at {newest}: start with "
        f"--start-version {version} (in Python version={version}) to continue from there, or "
        f'with --start-version auto (version="auto") to use what the instances report; or load '
        f"version {newest} into it, or restart it"
    )


def _older(version: int | None, newest: int) -> str:
    has = "weights of unknown version" if version is None else f"version {version}"
    return (
        f"it has {has}, the trainer is at {newest}, and no way to load that is known: publish the "
        "weights with a way to load them (Reload, Transfer, or your own loader), or load them into "
        f"it: it joins when its /weight_info reports {newest}"
    )


class RequiredModel(NamedTuple):
    """The name of the model that an instance must serve to join; "": any. `of_run`: it is the run's
    and stays; otherwise it is that of the other instances."""

    name: str = ""
    of_run: bool = False


class InstanceAdmission:
    """Admits one instance each time it appears: it joins, or stays away with a reason.

    started_at      Unix seconds, as it last reported; None if it has never answered
    awaits_weights  it is away, and would join with other weights

    on_joining  called with its description before it joins the fleet
    """

    def __init__(self, instance: FleetInstance, on_joining: Callable[[Description], None]) -> None:
        self.started_at: float | None = None
        self.awaits_weights = False
        self._instance = instance
        self._client = instance.client
        self._fleet = instance.fleet
        self._membership = instance.membership
        self._pause = instance.pause
        self._on_joining = on_joining
        self._version = JoiningVersion(instance.name, instance.fleet.first_version)

    async def admit(self) -> None:
        """Let it join. Raises an error if it may not."""
        limit_s = self._fleet.settings.control_timeout_s
        description = await with_timeout(self._client.describe(), limit_s)
        self._note_start(description.started_at)
        self._note_model(description)
        self._with_required_model(description)
        version = self._settle_version(description)
        async with self._instance.control_lock:  # nothing changes between the checks and the join
            await settle_pause(self._client, description, self._pause, self._fleet.settings)
            if description.version is None:
                # Labels its tokens from now on, to tell them from those after its first update.
                await with_timeout(self._client.set_version(version), limit_s)
            # Meanwhile others may have joined, and the trainer may have published a version.
            description = self._with_required_model(description)
            self._fleet.check_precision(self._client.name, description.precision)
            self._join(description, self._settle_version(description))

    def refuse(self, error: Exception) -> None:
        """The instance stays away because of `error`."""
        before = self._membership.reason
        self._membership.move(MembershipMove.REFUSE, error_line(error))
        self.awaits_weights = isinstance(error, VersionRefused | JoinsLater)
        news = self.awaits_weights and self._membership.reason != before
        level = logging.WARNING if news else logging.DEBUG
        log.log(level, "instance %s is still away: %s", self._client.name, self._membership.reason)

    def _note_start(self, started_at: float) -> None:
        """Raises InstanceError if the instance is unfit and was not restarted."""
        restarted = self.started_at not in (None, started_at)
        self.started_at = started_at
        if restarted:
            self._pause.move(RESTART)
        if self._membership.state is MembershipState.UNFIT:
            if not restarted:
                raise InstanceError(self._membership.reason)
            self._membership.move(MembershipMove.RESTART, "it was restarted")

    def _note_model(self, description: Description) -> None:
        """Forget how it joined before if it has come back with another model."""
        before = self._instance.description
        if before is not None and before.model not in (description.model, *description.models):
            self._instance.description = None

    def _with_required_model(self, description: Description) -> Description:
        required = self._fleet.required_model(self._client.name)
        return with_required_model(self._client, description, required)

    def _settle_version(self, description: Description) -> int:
        fleet = self._fleet
        gate = fleet.versions.gate(self._client.name, besides=FOUND_PAUSED)
        if gate:
            raise JoinsLater(f"its gate is closed: {gate}")
        return self._version.settle(
            description.version,
            fleet.newest_version,
            follows=fleet.versions.follows,
            can_load=fleet.can_load,
        )

    def _join(self, description: Description, version: int) -> None:
        self._instance.description = description
        self.awaits_weights = False
        self._on_joining(description)
        self._fleet.join(self._client.name, description, version)
        self._membership.move(MembershipMove.JOIN)


class ServesSeveral(Protocol):
    """A client whose instance serves several models (`Description.models`)."""

    def use_model(self, model: str) -> None:
        """Set the model name of our own requests to it."""


def with_required_model(
    client: InstanceClient, description: Description, required: RequiredModel
) -> Description:
    """The description with the required model. Raises InstanceError if the instance does not serve
    it: some answers would then come from another model."""
    ours = required.name
    if ours in ("", description.model) or not description.model:
        return description
    if ours not in description.models:
        serves = printable(", ".join(description.models) or description.model, 120)
        if required.of_run:
            why = f"the samples of this run come from {ours}: a run has one model"
            otherwise = "or restart the gateway to begin another run, with another --store"
        else:
            why = f"the other instances serve {ours}: one gateway serves one model"
            otherwise = f"or remove the instances that serve {ours}"
        raise InstanceError(
            f"it serves {serves}, but {why}. Start it with --served-model-name {ours} if it is the "
            f"same model, put it behind another gateway, {otherwise}"
        )
    cast(ServesSeveral, client).use_model(ours)
    return msgspec.structs.replace(description, model=ours)


async def settle_pause(
    client: InstanceClient, description: Description, pause: InstancePause, settings: Settings
) -> None:
    """Pause the instance if it is held, else resume it. Raises InstanceError if somebody else has
    paused it: another scheduler may be loading weights.

    An instance that does not report whether it is paused is resumed: the process that paused it may
    be gone.
    """
    if "pause" not in description.capabilities:
        if pause.held:
            raise InstanceError(
                "it is held, but no longer supports pausing; release it, or start vLLM with "
                "VLLM_SERVER_DEV_MODE=1 in its environment"
            )
    elif pause.held:
        if not description.paused:
            await with_timeout(client.pause("keep", False), settings.control_timeout_s)
    elif description.paused and not (pause.ours or settings.resume_paused):
        pause.move(FIND)
        raise InstanceError(
            "it is paused, and not by us: another scheduler may be loading weights. It joins when "
            f"it is resumed; if nobody will do that, as after a crash, POST {client.name}/resume, "
            "or set resume_paused to resume instances that are found paused"
        )
    elif description.paused is not False:
        await with_timeout(client.resume(), settings.control_timeout_s)
    pause.move(RESUME)
