"""The hub that fronts connect to: a live scheduler whose work is done by several processes.

The core closes one thing without hearing from the front: a lost instance. So the fronts are asked
first. The gate is closed, every front with attempts on the instance reports how far its streams
have come (Lose, InstanceReleased), and then the scheduler is told. Until then the instance neither
gets work nor joins again. Afterwards the fronts close their connections to it (DisconnectInstance).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from rollout_sched.core.model.actions import Answer, Deliver, Discard, Dispatch, Interrupt
from rollout_sched.core.model.events import (
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    RequestWithdrawn,
)
from rollout_sched.link.connected_front import ConnectedFront
from rollout_sched.link.pieces import pieces_of
from rollout_sched.link.protocol import (
    Accepted,
    FleetChanged,
    Lose,
    RejectStreamed,
    ReleaseGroup,
    StopAttempt,
    TakeGroup,
    encode,
)
from rollout_sched.live import Driver, LiveScheduler
from rollout_sched.live.instances import FleetVersions, InFlight
from rollout_sched.live.requests import OF_GROUP, OVERTAKEN_S, PayloadFactory, RunningAttempts
from rollout_sched.live.trainer.samples import Prompt

#: Why the gate of a lost instance is closed until all fronts have reported their streamed tokens.
LOSING = "it is lost, and its streamed tokens are being collected"


@dataclass(slots=True)
class _Loss:
    """The loss of an instance: fronts that have not reported yet, and the calls to make then."""

    waiting: set[ConnectedFront]
    tells: list[Callable[[], None]] = field(default_factory=list)


class SharedFleetAttempts:
    """The attempts of all fronts (`live.instances.attempts.FleetAttempts`); `local`: those of the
    front in this process."""

    def __init__(
        self, local: RunningAttempts, fronts: Collection[ConnectedFront], versions: FleetVersions
    ) -> None:
        self._local = local
        self._fronts = fronts
        self._versions = versions
        self._losses: dict[str, _Loss] = {}

    def on(self, instance: str) -> list[InFlight]:
        remote = [one for front in self._fronts for one in front.attempts.on(instance)]
        return [*self._local.on(instance), *remote]

    async def answered(self, instance: str) -> None:
        """Wait after a pause that aborts, until every attempt on the instance has ended."""
        await asyncio.gather(self._local.answered(instance), self._answered(instance))

    async def _answered(self, instance: str) -> None:
        remote = [one for front in self._fronts for one in front.attempts.on(instance)]
        if not remote:
            return
        ends = [one.ended() for one in remote]
        await asyncio.wait(ends, timeout=OVERTAKEN_S)
        for front in self._fronts:
            for one in front.attempts.on(instance):
                front.order(StopAttempt(one.dispatch.attempt, "it did not stop"))
        await asyncio.wait(ends)

    def stop(self, attempt: int, reason: str) -> None:
        """Abort an attempt that may never answer; its request continues from the tokens it has."""
        front = self._front_of(attempt)
        if front is None:
            self._local.stop(attempt, reason)
            return
        one = front.attempts.get(attempt)
        assert one is not None  # it is this front's
        one.stopped = True
        front.order(StopAttempt(attempt, reason))

    def reject_streamed(self, attempt: int) -> None:
        """Fail an attempt whose stream has brought tokens: they may be of unknown weights."""
        front = self._front_of(attempt)
        if front is None:
            self._local.reject_streamed(attempt)
        else:
            front.order(RejectStreamed(attempt))

    def _front_of(self, attempt: int) -> ConnectedFront | None:
        return next((f for f in self._fronts if f.attempts.get(attempt) is not None), None)

    # -- losses ----------------------------------------------------------------------------

    def lose(self, instance: str, tell: Callable[[], None]) -> None:
        """The scheduler is told of the loss when every front has reported its streamed tokens;
        until then nothing is sent to the instance, and it does not join."""
        loss = self._losses.get(instance)
        if loss is not None:
            loss.tells.append(tell)
            return
        waiting = {front for front in self._fronts if front.attempts.on(instance)}
        if not waiting:
            self._local.lose(instance, tell)
            return
        self._losses[instance] = _Loss(waiting, [tell])
        self._versions.close_gate(instance, LOSING)
        for front in waiting:
            front.order(Lose(instance))

    def released(self, front: ConnectedFront, instance: str) -> None:
        """A front has reported everything, or is gone."""
        loss = self._losses.get(instance)
        if loss is None or front not in loss.waiting:
            return
        front.lose(instance)
        loss.waiting.discard(front)
        if loss.waiting:
            return
        del self._losses[instance]
        for tell in loss.tells:
            self._local.lose(instance, tell)
        self._versions.open_gate(instance, LOSING)

    def front_gone(self, front: ConnectedFront) -> None:
        """The front is gone and will report nothing more."""
        for instance in list(self._losses):
            self.released(front, instance)


class Host:
    """The scheduler's process, with several fronts; knows which front owns which request. Sends the
    driver's orders to the owner of their request: a connected front, or the front in this process.
    Create it before anything is submitted.

    The front that received a client's request owns it; a group is owned by the front that it was
    given to. The host also keeps the tokens of a group, attempt by attempt, so that another front
    can continue. The host supervises the instances, whichever front sends them requests.
    """

    def __init__(self, driver: Driver) -> None:
        self.fronts: dict[str, ConnectedFront] = {}
        self._driver = driver
        self._owners: dict[str, ConnectedFront] = {}
        self._here: dict[type[Any], Callable[[Any], None]] = driver.front.orders
        self._attempts = SharedFleetAttempts(
            driver.front.attempts, self.fronts.values(), driver.versions
        )
        driver.fleet.attempts = self._attempts
        pump = driver.pump
        pump.on(Dispatch, self._dispatch)
        pump.on(Interrupt, self._interrupt)
        pump.on(Answer, self._answer)
        pump.on(Discard, self.discard)
        pump.on(Deliver, self._deliver)
        pump.watch(self._fleet_changed, InstanceJoined, InstanceLost)
        pump.watch(self._departed, InstanceLost)

    @property
    def epoch(self) -> str:
        """The scheduler's epoch: frames of another epoch are refused."""
        return self._driver.epoch

    @property
    def owned(self) -> int:
        """Number of clients' requests and groups that other fronts own."""
        return len(self._owners)

    # -- fronts come and go ----------------------------------------------------------------

    def connect(self, name: str, send: Callable[[bytes], None]) -> ConnectedFront:
        """A front has connected to this epoch; `send` takes the frames for it, in order."""
        before = self.fronts.get(name)
        if before is not None:
            self.disconnect(before)
        front = ConnectedFront(name, self._driver, self, send)
        self.fronts[name] = front
        front.order(FleetChanged(self._driver.max_model_len()))
        return front

    def disconnect(self, front: ConnectedFront) -> None:
        """The front and its clients are gone; its groups continue elsewhere with the tokens that
        the host has."""
        if self.fronts.get(front.name) is not front:
            return
        del self.fronts[front.name]
        named = [name for name, owner in self._owners.items() if owner is front]
        for request in [name for name in named if name not in front.groups]:
            self._driver.tell(RequestWithdrawn(request))  # may dispatch another of them
            self._owners.pop(request, None)
        ends = front.end()
        for group, spec in front.groups.items():
            self._give(group, spec)
        for event in ends:
            front.tell(event)
        self._attempts.front_gone(front)

    def _fleet_changed(self, event: InstanceJoined | InstanceLost) -> None:
        """Called before the event's actions are carried out, so that fronts know the change
        first."""
        changed = FleetChanged(self._driver.max_model_len())
        for front in self.fronts.values():
            front.order(changed)

    def _departed(self, event: InstanceLost) -> None:
        for front in self.fronts.values():
            front.departed(event.instance)

    # -- groups ----------------------------------------------------------------------------

    def submit_group(self, submitted: GroupSubmitted, make: PayloadFactory, spec: bytes) -> None:
        """Submit a group to the front with the fewest groups, which makes the payloads from
        `spec`."""
        self._give(submitted.group, spec)
        try:
            self._driver.submit_group(submitted, make)
        except BaseException:
            self._take_back(submitted.group, ())
            raise

    def _give(self, group: str, spec: bytes) -> None:
        """Give a group and its tokens to a front; to the host's own if there is no other."""
        front = min(self.fronts.values(), key=lambda front: len(front.groups), default=None)
        if front is None:
            self._owners.pop(group, None)
            return
        self._owners[group] = front
        front.groups[group] = spec
        payloads = self._driver.front.payloads
        pieces = [piece for name in payloads.of_group(group) for piece in pieces_of(payloads, name)]
        front.order(TakeGroup(group, spec, tuple(pieces)))

    def _take_back(self, group: str, requests: tuple[str, ...]) -> None:
        front = self._owners.pop(group, None)
        if front is not None:
            del front.groups[group]
            front.order(ReleaseGroup(group, requests))

    # -- what fronts say (`connected_front`) ----------------------------------------

    def owns(self, front: ConnectedFront, request: str) -> bool:
        if request in self._owners:
            return False
        self._owners[request] = front
        return True

    def no_longer_owned(self, request: str) -> None:
        self._owners.pop(request, None)

    def is_owned(self, front: ConnectedFront, name: str) -> bool:
        return self._owners.get(name) is front

    def released(self, front: ConnectedFront, instance: str) -> None:
        self._attempts.released(front, instance)

    # -- what the scheduler orders ---------------------------------------------------------

    def _dispatch(self, action: Dispatch) -> None:
        front = self._owners.get(action.group or action.request)
        if front is None:
            self._here[Dispatch](action)
        else:
            front.dispatch(action)

    def _interrupt(self, action: Interrupt) -> None:
        self._here[Interrupt](action)  # ignored if the attempt is not of this front
        for front in self.fronts.values():
            front.interrupt(action)

    def _answer(self, action: Answer) -> None:
        front = self._owners.pop(action.sample.request, None)
        if front is None:
            self._here[Answer](action)
        else:
            front.order(action)

    def discard(self, action: Discard) -> None:
        front = self._owners.get(action.group or action.request)
        if front is not None:
            front.order(action)
            if not action.attempt:
                front.turns.pop(action.request, None)
        if front is None or action.group:
            self._here[Discard](action)
        if action.ends and not action.group:
            self._owners.pop(action.request, None)
        elif action.ends and action.reason in OF_GROUP:
            self._driver.pump.defer(self._take_back, action.group, ())

    def _deliver(self, action: Deliver) -> None:
        requests: dict[str, list[str]] = {}
        for sample in action.samples:
            requests.setdefault(sample.group, []).append(sample.request)
        for group, names in requests.items():
            self._take_back(group, tuple(names))
        self._here[Deliver](action)


class Hub:
    """Makes a live scheduler the host of fronts. Create it before prompts are submitted.

    The trainer's groups are given to the connected fronts. Groups with a tool, which runs in this
    process, and groups restored from a store are made by the host itself.
    """

    def __init__(self, live: LiveScheduler) -> None:
        self._live = live
        self._host = Host(live.driver)
        live.trainer.submissions.place = self._place
        live.fronts = self.state

    @property
    def epoch(self) -> str:
        """The scheduler's epoch, which changes with each start."""
        return self._host.epoch

    def connect(self, name: str, send: Callable[[bytes], None]) -> bytes:
        """A front has connected; it replaces one of the same name. `send` takes the frames for it,
        in order. Returns the first frame (`protocol.Accepted`)."""
        live = self._live
        driver, stream_every = live.driver, live.trainer.submissions.payloads.stream_every
        accepted = Accepted(self.epoch, driver.settings, driver.view.keeps_partial, stream_every)
        self._host.connect(name, send)
        return encode(accepted)

    def receive(self, name: str, frame: bytes) -> None:
        """Handle a frame of a connected front. Raises msgspec.DecodeError."""
        front = self._host.fronts.get(name)
        if front is not None:
            front.receive(frame)

    def disconnect(self, name: str) -> None:
        """The front and its clients are gone; its groups continue elsewhere with the tokens that
        the host has."""
        front = self._host.fronts.get(name)
        if front is not None:
            self._host.disconnect(front)

    def state(self) -> dict[str, dict[str, int]]:
        """For each front, the numbers of its groups, running attempts, and refused frames and
        requests."""
        return {
            name: {
                "groups": len(front.groups),
                "attempts": len(front.attempts),
                "refused": front.refused,
            }
            for name, front in self._host.fronts.items()
        }

    def _place(self, prompt: Prompt, submitted: GroupSubmitted, make: PayloadFactory) -> None:
        if self._host.fronts:
            self._host.submit_group(submitted, make, encode(prompt))
        else:
            self._live.driver.submit_group(submitted, make)
