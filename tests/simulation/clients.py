"""Clients of the data plane: those of the soak test, well-behaved and hostile, on the simulated
network."""

from __future__ import annotations

import asyncio
import re
from random import Random
from typing import TYPE_CHECKING

from benchmarks.soak import hostile, innocents
from benchmarks.soak.wire import Answer, Line, WireError, post
from tests.simulation import gateway
from tests.simulation.faults import InstanceDies
from tests.simulation.ledger import hold

if TYPE_CHECKING:
    from tests.simulation.world import World

#: Seconds that a client waits for a gateway whose machine is gone. A hostile call must end within
#: this time, too: it is longer than the gateway's slowest deadline for clients.
PATIENCE_S = 300.0
ATTACK_S = 100.0

#: When the instances have joined, without faults.
EARLIEST_S = 1.5

#: When the first instance has joined, even over the slowest links: before, the gateway refuses
#: calls that it only passes on.
JOINED_S = 2.5

#: Statuses when no instance can answer; without faults they must not occur.
NOBODY = (500, 502, 503)

#: Attacks that the gateway refuses without passing anything on.
REFUSED = ("n bomb", "deep", "huge head", "slow body", "bad key")


class Call:
    """A call of a well-behaved client: `began_s`, `ended_s`, its outcome in a word, and the
    answer."""

    def __init__(self, world: World, number: int) -> None:
        self.number = number
        self.began_s = 0.0
        self.ended_s = -1.0
        self.came = ""
        self.answer = b""
        self._world = world

    @property
    def is_lied_to(self) -> bool:
        """Whether it got an answer that is not its own, and not a refusal."""
        status = re.match(r"wrong: [\w ]+: (\d{3}) ", self.came)
        refused = status is not None and int(status[1]) in _nobody(self._world)
        return self.came.startswith("wrong: ") and not refused and b'"error"' not in self.answer

    async def make(self, at_s: float) -> None:
        plan = self._world.plan
        await asyncio.sleep(at_s)
        self.began_s = self._world.kernel.time()
        rng = Random(f"call/{plan.seed}/{self.number}")
        asking = innocents.asking(self.number, gateway.KEY, rng)

        def check(answer: Answer) -> None:
            self.answer = answer.body
            asking.check(answer)

        try:
            async with asyncio.timeout(PATIENCE_S):
                line = await Line.open(gateway.PORT)
                try:
                    await innocents.call(line, asking._replace(check=check))
                finally:
                    line.drop()
            self.came = "answered"
        except TimeoutError:
            self.came = "not ended"
        except (WireError, OSError) as error:
            self.came = f"broken off: {error}"
        except innocents.WrongAnswer as wrong:
            self.came = f"wrong: {wrong}"
        self.ended_s = self._world.kernel.time()


def _nobody(world: World) -> tuple[int, ...]:
    """Statuses when no instance can answer: 404 if those that are here may serve another model."""
    another = any(isinstance(f, InstanceDies) and f.model for f in world.plan.faults)
    return (*NOBODY, 404) if another else NOBODY


async def flood(world: World, at_s: float, number: int) -> None:
    """Calls of one client, all at once. Raises LawBroken if one has no end."""
    await asyncio.sleep(at_s)
    body = {"model": innocents.MODEL, "prompt": "flood", "max_tokens": 20, "ignore_eos": True}
    data = post(innocents.COMPLETIONS, body, f"authorization: Bearer {gateway.FLOOD_KEY}")

    async def call() -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                line = await Line.open(gateway.PORT)
                try:
                    await line.send(data)
                    status = (await line.answer()).status
                    hold("a flood is answered", status in (200, 429, *_nobody(world)), status)
                finally:
                    line.drop()
        except (WireError, OSError):
            return  # the gateway closed the connection, or is away
        except TimeoutError:
            hold("every call ends", False, "one of a flood")

    await asyncio.gather(*[call() for _ in range(number)])


async def attack(world: World, number: int, at_s: float, kind: str) -> None:
    """The call of a hostile client. Raises LawBroken if the answer is not an allowed one."""
    await asyncio.sleep(at_s)
    rng = Random(f"attack/{world.plan.seed}/{number}")
    try:
        async with asyncio.timeout(ATTACK_S):
            status = await hostile.attack(kind, gateway.KEY, gateway.PORT, rng)
    except (WireError, OSError):
        return  # the gateway closed the connection, or is away
    except TimeoutError:
        hold("every call ends", False, f"attack {number}: {kind}")
        return
    may_be = hostile.ATTACKS[kind].statuses
    if world.plan.faults or at_s < JOINED_S:
        may_be = (*may_be, *_nobody(world))
    if status:
        hold("an attack gets an allowed answer", status in may_be, (kind, status))
