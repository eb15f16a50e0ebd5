"""The weights of a simulated server: the label of what they make, and their updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from rollout_sched.simulators.fake_instance.errors import Refusal
from rollout_sched.simulators.fake_instance.realtime_instance import RealtimeInstance
from rollout_sched.simulators.fake_instance.rendezvous import RankRange, Rendezvous

#: Number and label of what a server is started with.
FIRST = -1
FIRST_LABEL = "default"


class EngineWeights:
    """Of one engine from its start to its end. Calls that change something raise Refusal.

    As in vLLM, a weight call that fails leaves the model half torn down, and so does, while it
    lasts, an update by transfer.

    load_s       seconds that loading takes, on the event loop's clock
    check_alive  raises Refusal once the engine has ended
    label        of what it is started with; `number_of` it is the instance's version then

    `says` is the label that it tells when it is asked, where that is a lie; None where it tells
    none at all.
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
        self._transfer = False  # weights can be sent
        self._updating = False
        self._group = Rendezvous()

    @property
    def half_loaded(self) -> bool:
        """The next step will be the end."""
        return self._torn or self._updating

    def label_of(self, version: int) -> str:
        return self._labels[version]

    async def set_label(self, label: str) -> None:
        """Tokens to come carry this label."""
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
        """What it tells when it is asked for its label; None if nothing."""
        return self.label if self.says == "" else self.says

    async def reload(self, path: object) -> None:
        """From disk. If there is nothing the model is torn."""
        self._check_alive()
        if path is not None and not (isinstance(path, str) and Path(path).exists()):
            raise self.tear(f"no weights at {path!r}")
        await self._load()

    async def init_transfer(self, place: RankRange | None = None) -> None:
        """Weights can be sent, with NCCL once all ranks of the group are there; `place` is ours."""
        self._check_alive()
        if place is not None:
            if place.ranks.stop > place.world:
                raise Refusal(500, f"rank {place.ranks[-1]} is not in a group of {place.world}")
            await self._group.join(place)
        self._check_alive()
        self._transfer = True

    def leave(self) -> None:
        """The process ends, and with it its part in a group."""
        self._group.leave()

    def start_update(self) -> None:
        """Refused, which does no harm, if transfers are not set up or an update is under way."""
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
        """All that is sent, in one call. Refused if transfers are not set up."""
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
    """The version that a label stands for; of one that is no number, one out of the way of those
    that are."""
    if label == FIRST_LABEL:
        return FIRST
    if label.isdecimal():
        return int(label)
    return (1 << 60) + int.from_bytes(blake2b(label.encode(), digest_size=7).digest(), "little")
