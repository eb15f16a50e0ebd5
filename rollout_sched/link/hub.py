"""What fronts connect to: a live scheduler whose work is done by several processes."""

from __future__ import annotations

from collections.abc import Callable

from rollout_sched.core.events import GroupSubmitted
from rollout_sched.link.host import Host
from rollout_sched.link.recipe import Welcome, encoded
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.payload_book import PayloadFactory
from rollout_sched.live.samples import Prompt


class Hub:
    """Makes a live scheduler the host of fronts. Make it before prompts are submitted.

    The trainer's groups are given to the fronts that are connected; those with a tool, which is
    this process's, are made here, and so is what a store has brought.
    """

    def __init__(self, live: LiveScheduler) -> None:
        self._live = live
        self._host = Host(live.driver)
        live.trainer.submissions.place = self._place
        live.fronts = self.state

    @property
    def epoch(self) -> str:
        """Of the scheduler; another with each start."""
        return self._host.epoch

    def connect(self, name: str, send: Callable[[bytes], None]) -> bytes:
        """A front is here, in place of one of the same name if there is one. `send` takes its
        frames, in order. Returns the frame with which it is welcomed (`recipe.Welcome`)."""
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
        """A frame of a front that is connected. Raises msgspec.DecodeError."""
        front = self._host.fronts.get(name)
        if front is not None:
            front.receive(frame)

    def disconnect(self, name: str) -> None:
        """It is gone: its clients with it; its groups go on elsewhere from what is known here."""
        front = self._host.fronts.get(name)
        if front is not None:
            self._host.disconnect(front)

    def state(self) -> dict[str, dict[str, int]]:
        """Of each front: groups and attempts that it has, and reports of it that were for another
        epoch."""
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
