"""The host: the scheduler's process, with several fronts; knows which front owns which request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_sched.core.actions import Answer, Deliver, Discard, Dispatch, Interrupt
from rollout_sched.core.events import (
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    RequestWithdrawn,
)
from rollout_sched.link.connected_front import ConnectedFront
from rollout_sched.link.fleet_attempts import SharedFleetAttempts
from rollout_sched.link.group_pieces import pieces_of
from rollout_sched.link.messages import FleetChanged, ReleaseGroup, TakeGroup
from rollout_sched.live.driver import Driver
from rollout_sched.live.endings import OF_GROUP
from rollout_sched.live.payload_book import PayloadFactory


class Host:
    """Sends the driver's orders to the owner of their request: a connected front, or the front in
    this process. Create it before anything is submitted.

    The front that received a client's request owns it; a group is owned by the front that it was
    given to. The tokens of a group are also kept here, attempt by attempt, so that another front
    can continue. Instances are supervised here, whichever front sends them requests.
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
        front = ConnectedFront(name, self.epoch, self._driver, self, send)
        self.fronts[name] = front
        front.order(FleetChanged(self._driver.max_model_len()))
        return front

    def disconnect(self, front: ConnectedFront) -> None:
        """The front and its clients are gone; its groups continue elsewhere with the tokens kept
        here."""
        if self.fronts.get(front.name) is not front:
            return
        del self.fronts[front.name]
        named = [name for name, owner in self._owners.items() if owner is front]
        for request in [name for name in named if name not in front.groups]:
            self._driver.tell(RequestWithdrawn(request))  # may dispatch another of them
            self._owners.pop(request, None)
        ends = front.end()
        for group, recipe in front.groups.items():
            self._give(group, recipe)
        for event in ends:
            front.tell(event)
        self._attempts.gone(front)

    def _fleet_changed(self, event: InstanceJoined | InstanceLost) -> None:
        """Called before the event's actions are carried out, so that fronts know the change
        first."""
        changed = FleetChanged(self._driver.max_model_len())
        for front in self.fronts.values():
            front.order(changed)

    def _departed(self, event: InstanceLost) -> None:
        for front in self.fronts.values():
            front.ordered.departed(event.instance)

    # -- groups ----------------------------------------------------------------------------

    def submit_group(self, submitted: GroupSubmitted, make: PayloadFactory, recipe: bytes) -> None:
        """Like `Driver.submit_group`, for the front with the fewest groups, which makes the
        payloads from `recipe`."""
        self._give(submitted.group, recipe)
        try:
            self._driver.submit_group(submitted, make)
        except BaseException:
            self._take_back(submitted.group, ())
            raise

    def _give(self, group: str, recipe: bytes) -> None:
        """Give a group to a front, with its tokens; to the front here if there is no other."""
        front = min(self.fronts.values(), key=lambda front: len(front.groups), default=None)
        if front is None:
            self._owners.pop(group, None)
            return
        self._owners[group] = front
        front.groups[group] = recipe
        payloads = self._driver.front.payloads
        pieces = [piece for name in payloads.of_group(group) for piece in pieces_of(payloads, name)]
        front.order(TakeGroup(group, recipe, tuple(pieces)))

    def _take_back(self, group: str, requests: tuple[str, ...]) -> None:
        front = self._owners.pop(group, None)
        if front is not None:
            del front.groups[group]
            front.order(ReleaseGroup(group, requests))

    # -- what fronts say (`connected_front.Owners`) ----------------------------------------

    def owns(self, front: ConnectedFront, request: str) -> bool:
        if request in self._owners:
            return False
        self._owners[request] = front
        return True

    def no_longer_owned(self, request: str) -> None:
        self._owners.pop(request, None)

    def is_owned(self, front: ConnectedFront, name: str) -> bool:
        return self._owners.get(name) is front

    def relinquished(self, front: ConnectedFront, instance: str) -> None:
        self._attempts.relinquished(front, instance)

    # -- what the scheduler orders ---------------------------------------------------------

    def _dispatch(self, action: Dispatch) -> None:
        front = self._owners.get(action.group or action.request)
        if front is None:
            self._here[Dispatch](action)
        else:
            front.ordered.dispatch(action)

    def _interrupt(self, action: Interrupt) -> None:
        self._here[Interrupt](action)  # ignored if the attempt is not of this front
        for front in self.fronts.values():
            front.ordered.interrupt(action)

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
                front.ordered.turns.pop(action.request, None)
        if front is None or action.group:
            self._here[Discard](action)
        if action.ends and not action.group:
            self._owners.pop(action.request, None)
        elif action.ends and action.reason in OF_GROUP:
            self._driver.pump.afterwards(self._take_back, action.group, ())

    def _deliver(self, action: Deliver) -> None:
        requests: dict[str, list[str]] = {}
        for sample in action.samples:
            requests.setdefault(sample.group, []).append(sample.request)
        for group, names in requests.items():
            self._take_back(group, tuple(names))
        self._here[Deliver](action)
