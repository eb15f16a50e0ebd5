"""Weights that a trainer loads through the gateway, with the calls it would make to one server.

The gateway follows the protocol (`weight_protocol`). From the first call on, the gates of the
instances are closed, so that no request is sent to half-loaded weights. When the last call has
succeeded on all instances, they serve the next version, their tokens are labelled with it, and the
gates open.

`/resume` while weights are half loaded is refused: vLLM's next step would be its last, and a
trainer that resumes in a `finally` does not mean to cause that. The version number is ours unless
the trainer gives one, and servers are labelled with it before anything goes on, so their spans and
our book cannot diverge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Any, cast

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import InstanceLost
from rollout_sched.core.model.model import InstanceStatus
from rollout_sched.integrations.gateway.control_plane.fanout import (
    Answer,
    FleetCall,
    broadcast,
    to_each,
)
from rollout_sched.integrations.gateway.control_plane.weight_protocol import (
    BEGINS,
    Conflict,
    Member,
    PartialUpdate,
    ProtocolStep,
    UpdateState,
    WeightProtocol,
)
from rollout_sched.integrations.vllm.protocol.answers import version_of
from rollout_sched.integrations.vllm.weights import RankFields, WeightClient, deal
from rollout_sched.live import Driver, with_timeout
from rollout_sched.live.instances import THROUGH_US, InstanceSupervisor

log = logging.getLogger(__name__)


class VersionLabels:
    """Reads the version of new weights from a trainer's calls, or else takes the next one, labels
    the instances with it, and publishes it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def version_in(self, body: bytes, field: str) -> int | None:
        """The version that a call names; None if it names none. Raises CallerError."""
        label = json_object(body).get(field)
        if label is None:
            return None
        version, newest = version_of(label), self._driver.view.run.version
        if version is None:
            raise CallerError(
                f'{field}: the label must be a version number, such as "{newest + 1}"; without a '
                "label the gateway counts versions itself"
            )
        if version < newest:
            raise Conflict(
                f"{field} is {version}, but version {newest} is published; versions must increase"
            )
        return version

    async def serve_anew(self, supervisors: Sequence[InstanceSupervisor], told: int | None) -> None:
        """All these instances have new weights."""
        version = self._driver.view.run.version + 1 if told is None else told

        async def label(supervisor: InstanceSupervisor) -> dict[str, Any]:
            limit_s = self._driver.settings.control_timeout_s
            async with supervisor.control_lock:
                await with_timeout(supervisor.client.set_version(version), limit_s)
            return {}

        _, answer = await to_each(supervisors, label)
        unlabelled = {failure["url"] for failure in answer["failed"]}
        if unlabelled:  # for these the version is not recorded
            log.warning("version %d: %s cannot be labelled", version, ", ".join(sorted(unlabelled)))
        self.publish(version, [s for s in supervisors if s.name not in unlabelled])

    def publish(self, version: int, supervisors: Sequence[InstanceSupervisor]) -> None:
        for supervisor in supervisors:
            self._driver.versions.moved(supervisor.name, version, THROUGH_US)


def json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; an empty body is an empty object. Raises CallerError."""
    try:
        return msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallerError("body: not a JSON object") from error


#: Why the gate of an instance is closed. A request sent to a held instance would run with whatever
#: weights it has when it resumes.
LOADING = "the trainer loads weights"
HELD = "the trainer has paused it"

_OURS = (InstanceStatus.DRAINING, InstanceStatus.PAUSING, InstanceStatus.UPDATING)


class TrainerUpdates:
    """Carries out the weight calls of a trainer, one after the other."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._labels = VersionLabels(driver)
        self._protocol = WeightProtocol()
        self._group: frozenset[Member] = frozenset()  # members of the last transfer that was set up
        self._turn = asyncio.Lock()
        driver.pump.watch(self._lost, InstanceLost)

    def state(self) -> dict[str, Any]:
        """The update's state; it shows why nothing is dispatched."""
        half = self._protocol.half_done
        return {
            "state": str(self._protocol.state),
            "failed": sorted(member.name for member in half.failed) if half else [],
            "remedy": half.remedy if half else "",
        }

    def ranks_meet_in(self, step: ProtocolStep | None) -> bool:
        """Whether all ranks of a group take part in a call of this step together, so that it must
        not be sent again to only some of them."""
        begun = self._protocol.state is UpdateState.BEGUN
        return step is ProtocolStep.SET_UP or (step is ProtocolStep.LOAD and begun)

    async def send(self, call: FleetCall, step: ProtocolStep, ranks: RankFields | None) -> Answer:
        """As `broadcast`, to all instances that take part; `done_before` counts those that had done
        this call before and were not asked again. `ranks`: the body's fields with ranks, if any.

        Raises CallerError, and InstanceError if an instance does not report how many ranks it has.
        """
        async with self._turn:
            if step is ProtocolStep.SET_UP:
                return await self._set_up(call, ranks)
            if step is ProtocolStep.LABEL:
                return await self._label(call)
            return await self._load(call, step)

    def reachable(self) -> list[InstanceSupervisor]:
        """The instances that a trainer's weights can reach: all that have joined, and those that
        would join with other weights."""
        supervisors = self._driver.supervisors.values()
        return [each for each in supervisors if each.joined or each.admission.awaits_weights]

    # -- pauses ----------------------------------------------------------------------------

    def held(self, names: Iterable[str]) -> None:
        """Instances with these names are paused, and get no new requests."""
        for name in names:
            self._driver.versions.close_gate(name, HELD)

    def check_release(self, path: str) -> None:
        """Raises Conflict while instances have weights that are neither old nor new."""
        if self._protocol.half_loaded:
            raise Conflict(
                f"{path} would resume with weights that are half loaded: finish the update first, "
                "or begin it again"
            )

    def released(self, names: Iterable[str]) -> None:
        """Instances were told to resume; `names` leaves out those that could not be told."""
        for name in names:
            self._driver.versions.open_gate(name, HELD)

    # -- set up ----------------------------------------------------------------------------

    async def _set_up(self, call: FleetCall, ranks: RankFields | None) -> Answer:
        here = self.reachable()
        if ranks is None or not here:
            return (await broadcast(here, call))[1]
        info = json_object(call.body)
        sizes = await asyncio.gather(*(self._world_size(each) for each in here))
        dealt = [msgspec.json.encode(own) for own in deal(info, ranks, sizes)]
        names = [supervisor.name for supervisor in here]
        _, answer = await broadcast(here, call, dict(zip(names, dealt, strict=True)))
        self._group = frozenset(() if answer["failed"] else map(_member, here))
        return answer

    async def _world_size(self, supervisor: InstanceSupervisor) -> int:
        client = cast(WeightClient, supervisor.client)
        return await with_timeout(client.world_size(), self._driver.settings.control_timeout_s)

    # -- load ------------------------------------------------------------------------------

    async def _load(self, call: FleetCall, step: ProtocolStep) -> Answer:
        protocol = self._protocol
        identity = _identity(call)
        self._check_that_we_load_nothing()
        protocol.check(step, identity)
        told = (
            self._labels.version_in(call.body, "weight_version")
            if step is ProtocolStep.FINISH
            else None
        )
        members = protocol.members(self._candidates(step), step)
        pending = [self._driver.supervisors[m.name] for m in protocol.pending(identity, members)]
        beside = self._beside(members) if step in (ProtocolStep.LOAD, ProtocolStep.WHOLE) else []
        for name in (*(member.name for member in members), *(each.name for each in beside)):
            self._driver.versions.close_gate(name, LOADING)
        _, answer = await broadcast([*pending, *beside], call)
        _set_apart(answer, {supervisor.name for supervisor in beside})
        answer["done_before"] = len(members) - len(pending)
        failed = {failure["url"] for failure in answer["failed"]}
        if failed and not _left_as_it_was(answer, step):
            missing = frozenset(member for member in members if member.name in failed)
            done = frozenset(members) - missing
            protocol.half_did(step, PartialUpdate(identity, call.path, done, missing))
            log.warning("%s", self.state()["remedy"])
        elif members and not failed and protocol.did(step, identity, members):
            away = {failure["url"] for failure in answer["away"]}
            loaded = [self._driver.supervisors[member.name] for member in members]
            await self._labels.serve_anew(
                [*loaded, *(b for b in beside if b.name not in away)], told
            )
        self._open_gates()
        if step is ProtocolStep.FINISH and not failed and protocol.half_done is not None:
            raise Conflict(protocol.half_done.remedy)
        return answer

    def _check_that_we_load_nothing(self) -> None:
        for instance in self._driver.view.instances:
            if instance.status in _OURS:
                version = self._driver.view.run.version
                raise Conflict(
                    f"the gateway is loading version {version}; wait until it is `loaded` in "
                    "GET /admin/state"
                )

    def _candidates(self, step: ProtocolStep) -> list[Member]:
        """The instances that may take part; in a transfer, those with which it was set up."""
        transfer = step in BEGINS or self._protocol.state is UpdateState.BEGUN
        if transfer and self._group:
            return [m for m in map(_member, self.reachable()) if m in self._group]
        return [_member(each) for each in self._here()]

    def _beside(self, members: Collection[Member]) -> list[InstanceSupervisor]:
        """Instances that have not joined for lack of weights also get weights that come in a single
        call. If they cannot load them, this delays no other instance."""
        if self._protocol.state is UpdateState.BEGUN or not members:
            return []
        names = {member.name for member in members}
        return [s for s in self.reachable() if not s.joined and s.name not in names]

    def _open_gates(self) -> None:
        """Open them if nothing is half loaded."""
        if not self._protocol.half_loaded:
            for name in self._driver.supervisors:
                self._driver.versions.open_gate(name, LOADING)

    def _lost(self, event: InstanceLost) -> None:
        """When it comes back, it has its first weights and takes no part in the current update."""
        self._protocol.lost(event.instance)
        for why in (LOADING, HELD):
            self._driver.versions.open_gate(event.instance, why)

    # -- label -----------------------------------------------------------------------------

    async def _label(self, call: FleetCall) -> Answer:
        """The trainer names the version of its weights."""
        if self._protocol.half_loaded:
            raise Conflict(
                "weights are half loaded: label them with the weight_version of "
                "/finish_weight_update, or after the update"
            )
        version = self._labels.version_in(call.body, "new_version")
        here = self._here()
        status, answer = await broadcast(here, call)
        if status == 200 and version is not None:
            self._labels.publish(version, here)
        return answer

    # -- internal --------------------------------------------------------------------------

    def _here(self) -> list[InstanceSupervisor]:
        return [each for each in self._driver.supervisors.values() if each.joined]


def _identity(call: FleetCall) -> bytes:
    """An identity of the call, made from its path, query and body."""
    return blake2b(f"{call.path}?{call.query}\n".encode() + call.body, digest_size=16).digest()


def _member(supervisor: InstanceSupervisor) -> Member:
    assert supervisor.admission.started_at is not None  # it has answered
    return Member(supervisor.name, supervisor.admission.started_at)


def _set_apart(answer: Answer, names: Collection[str]) -> None:
    """Move the failures of these instances to `away`: they do not fail the call."""
    answer["away"] = [failure for failure in answer["failed"] if failure["url"] in names]
    answer["failed"] = [failure for failure in answer["failed"] if failure["url"] not in names]


def _left_as_it_was(answer: dict[str, Any], step: ProtocolStep) -> bool:
    """Whether all instances have refused a call before they changed their weights.

    A refused begin has not begun. A 4xx status is about the call itself, except with AReaL's
    servers, which report a failed load with 400 and `success`.
    """
    if answer["results"]:
        return False
    return all(
        failure["status"] is not None
        and (step in BEGINS or (failure["status"] < 500 and not _says_that_it_failed(failure)))
        for failure in answer["failed"]
    )


def _says_that_it_failed(failure: dict[str, Any]) -> bool:
    said = failure["message"]
    return isinstance(said, dict) and said.get("success") is False
