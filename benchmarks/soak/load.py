"""Send the calls of a slice of time, at times set by the seed, however long the answers take."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AsyncExitStack

from benchmarks.soak import hostile, innocents
from benchmarks.soak.flood import Trainer, flood
from benchmarks.soak.innocents import WrongAnswer
from benchmarks.soak.verdict import Arm, Seen
from benchmarks.soak.wire import Line, WireError
from benchmarks.soak.world import FLOOD_KEY, KEY

#: Seconds within which every call must end. For hostile ones: the longest deadline that the gateway
#: sets a client, plus the time they take to send.
INNOCENT_S = 30.0
HOSTILE_S = 45.0

#: The share of hostile calls in a slice with hostile clients.
HOSTILE_SHARE = 0.1

#: Maximum of open calls; further calls are not started, which is reported as a finding.
MAX_OPEN = 2000


class Load:
    """All calls of a soak; `seen` has their outcomes. `attacks`: the kinds of hostile calls."""

    def __init__(self, port: int, seed: int, attacks: Sequence[str]) -> None:
        self.seen = Seen()
        self._port = port
        self._attacks = attacks
        self._rng = random.Random(seed)
        self._idle: deque[Line] = deque()
        self._number = 0
        self._open: set[asyncio.Task[None]] = set()

    async def warm_up(self, calls: int, rate: float) -> None:
        """Unmeasured calls: the first ones pay for loading and caching."""
        await self._send(Arm(), calls, rate, beside=False)

    async def flooded(self, calls: int, rate: float, trainer: Trainer, *, flooded: bool) -> None:
        """The same beside a trainer, and with `flooded` beside a client that floods."""
        seen = self.seen
        async with AsyncExitStack() as stack:
            if flooded:
                await stack.enter_async_context(flood(self._port, FLOOD_KEY, seen.flood))
            taking = asyncio.create_task(trainer.batches(calls / rate))
            await self._send(seen.flooded if flooded else seen.quiet, calls, rate, beside=False)
            seen.batches[flooded].append(await taking)

    async def slice(self, calls: int, rate: float, *, beside: bool) -> None:
        """Send `calls` calls at `rate` per second, and wait until the last one has ended."""
        arm = self.seen.beside if beside else self.seen.without
        await self._send(arm, calls, rate, beside=beside)

    async def _send(self, arm: Arm, calls: int, rate: float, *, beside: bool) -> None:
        due = time.monotonic()
        for _ in range(calls):
            due += self._rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if len(self._open) >= MAX_OPEN:
                self.seen.skipped += 1
                continue
            is_hostile = beside and self._rng.random() < HOSTILE_SHARE
            call = self._hostile() if is_hostile else self._innocent(arm, due)
            task = asyncio.create_task(call)
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        while self._open:
            await asyncio.wait(self._open)

    def close(self) -> None:
        for line in self._idle:
            line.drop()

    async def _innocent(self, arm: Arm, due: float) -> None:
        """`due`: when it should be sent; waiting time counts from then on."""
        self._number += 1
        asking = innocents.asking(self._number, KEY, self._rng)
        arm.calls += 1
        line: Line | None = None
        try:
            async with asyncio.timeout(INNOCENT_S):
                while self._idle and not self._idle[-1].usable:
                    self._idle.pop().drop()
                line = self._idle.pop() if self._idle else await Line.open(self._port)
                await innocents.call(line, asking)
        except TimeoutError:
            arm.hung += 1
        except WrongAnswer as error:
            arm.server_errors += _is_server_error(error)
            arm.wrong[_kind_of(str(error))] += 1
        except (WireError, OSError) as error:
            arm.wrong[_kind_of(f"{type(error).__name__}: {error}")] += 1
        else:
            if not asking.cancelled:
                arm.latencies_s.append(time.monotonic() - due)
            if line.keeps:
                self._idle.append(line)
                return
        if line is not None:
            line.drop()

    async def _hostile(self) -> None:
        kind = self._rng.choice(self._attacks)
        wanted = hostile.ATTACKS[kind].statuses
        try:
            async with asyncio.timeout(HOSTILE_S):
                status = await hostile.attack(kind, KEY, self._port, self._rng)
        except TimeoutError:
            outcome, fine = f"no end within {HOSTILE_S:.0f} s", False
        except (WireError, OSError) as error:
            # A client that sends slowly or does not read may be cut off; others get an answer.
            outcome, fine = f"cut off ({type(error).__name__})", not wanted
        else:
            outcome, fine = str(status) if wanted else "went", not wanted or status in wanted
        self.seen.hostile.setdefault(kind, Counter())[outcome] += 1
        if not fine:
            self.seen.unexpected[f"{kind}: {outcome}"] += 1


def _is_server_error(error: WrongAnswer) -> bool:
    return str(error).partition(": ")[2][:1] == "5"


def _kind_of(text: str) -> str:
    """The same text for errors that differ only in details."""
    return "".join("#" if sign.isdigit() else sign for sign in text)[:160]
