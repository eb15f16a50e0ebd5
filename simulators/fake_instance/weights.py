"""The weights of a simulated server: their label and their updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from rollout_sched.simulators.fake_instance.errors import Refusal
from rollout_sched.simulators.fake_instance.realtime_instance import RealtimeInstance
from rollout_sched.simulators.fake_instance.rendezvous import RankRange, Rendezvous

#: Number and label of the initial weights.
FIRST = -1
FIRST_LABEL = "default"


class EngineWeights:
    """The weights of one engine from its start to its end. Calls that change them raise Refusal.

    As in vLLM, the model is half loaded after a failed weight call, and during an update by
    transfer.

    load_s       seconds that loading takes, on the event loop's clock
    check_alive  raises Refusal if the engine is dead
    label        of the initial weights; `number_of` it is the instance's initial version

    `says` is the label that it reports when asked, which may be false; None if it reports no label.
    """

    def __init__(
        self,
        instance: RealtimeInstance,
        load_s: float,
        check_alive: Callable[[], None],
        label: str = FIRST_LABEL,
    ) -> None:
        self.label = label
        self.says: str | None = ""
        self._labels = {number_of(label): label}
        self._instance = instance
        self._load_s = load_s
        self._check_alive = check_alive
        self._torn = False
        self._transfer = False  # transfers are set up
        self._updating = False
        self._group = Rendezvous()

    @property
    def half_loaded(self) -> bool:
        """Whether the next step kills the engine."""
        return self._torn or self._updating

    def label_of(self, version: int) -> str:
        return self._labels[version]

    async def set_label(self, label: str) -> None:
        """Tokens get this label from now on."""
        self._check_alive()
        number = number_of(label)
        self._labels[number] = self.label = label
        await self._instance.set_version(number)

    def tear(self, reason: str) -> Refusal:
        """A weight call failed half way."""
        self._torn = True
        return Refusal(500, reason)

    @property
    def told(self) -> str | None:
        """The label that it reports when asked; None if none."""
        return self.label if self.says == "" else self.says

    async def reload(self, path: object) -> None:
        """Load from disk. If there is nothing at `path`, the model is half loaded afterwards."""
        self._check_alive()
        if path is not None and not (isinstance(path, str) and Path(path).exists()):
            raise self.tear(f"no weights at {path!r}")
        await self._load()

    async def init_transfer(self, place: RankRange | None = None) -> None:
        """Set up transfers; with NCCL wait for all ranks of the group. `place`: our ranks."""
        self._check_alive()
        if place is not None:
            if place.ranks.stop > place.world:
                raise Refusal(500, f"rank {place.ranks[-1]} is not in a group of {place.world}")
            await self._group.join(place)
        self._check_alive()
        self._transfer = True

    def leave(self) -> None:
        """The process ends, and leaves its group."""
        self._group.leave()

    def start_update(self) -> None:
        """Refused, without harm, if transfers are not set up or an update is in progress."""
        self._check_alive()
        if not self._transfer:
            raise Refusal(500, "Weight transfer not configured")
        if self._updating:
            raise Refusal(500, "Weight update already started")
        self._updating = True

    async def update(self) -> None:
        self._check_updating()
        await self._load()

    async def receive(self) -> None:
        """Receive all weights in one call. Refused if transfers are not set up."""
        self.start_update()
        await self.update()
        self._updating = False

    async def finish_update(self, label: str | None) -> None:
        self._check_updating()
        self._updating = False
        if label is not None:
            await self.set_label(label)

    def _check_updating(self) -> None:
        self._check_alive()
        if not self._updating:
            raise Refusal(500, "Weight update not started")

    async def _load(self) -> None:
        await asyncio.sleep(self._load_s)
        self._check_alive()


def number_of(label: str) -> int:
    """The version number of a label; a label that is not a number gets one that no numeric label
    has."""
    if label == FIRST_LABEL:
        return FIRST
    if label.isdecimal():
        return int(label)
    return (1 << 60) + int.from_bytes(blake2b(label.encode(), digest_size=7).digest(), "little")
