"""The hub that fronts connect to: a live scheduler whose work is done by several processes."""

from __future__ import annotations

from collections.abc import Callable

from rollout_sched.core.events import GroupSubmitted
from rollout_sched.link.host import Host
from rollout_sched.link.recipe import Welcome, encoded
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.payload_book import PayloadFactory
from rollout_sched.live.samples import Prompt


class Hub:
    """Makes a live scheduler the host of fronts. Create it before prompts are submitted.

    The trainer's groups are given to the connected fronts. Groups with a tool, which runs in this
    process, and groups restored from a store are made here.
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
        in order. Returns the welcome frame (`recipe.Welcome`)."""
        live = self._live
        payloads = live.trainer.submissions.payloads
        welcome = Welcome(
            self.epoch,
            live.driver.settings,
            live.driver.view.keeps_partial,
            payloads.stream_every,
            live.driver.view.leniency,
            live.seed,
        )
        self._host.connect(name, send)
        return encoded(welcome)

    def receive(self, name: str, frame: bytes) -> None:
        """Handle a frame of a connected front. Raises msgspec.DecodeError."""
        front = self._host.fronts.get(name)
        if front is not None:
            front.receive(frame)

    def disconnect(self, name: str) -> None:
        """The front and its clients are gone; its groups continue elsewhere with the tokens kept
        here."""
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
            self._host.submit_group(submitted, make, encoded(prompt))
        else:
            self._live.driver.submit_group(submitted, make)
