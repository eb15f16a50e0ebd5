"""The gateway's process, restarted whenever it has ended, as by a service manager."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.settings import Settings
from rollout_sched.store.errors import StoreError
from rollout_sched.store.store import ROWS
from tests.simulation.disk import Crash, MachineDisk
from tests.simulation.faults import GatewayDies, Power
from tests.simulation.kernel import Process
from tests.store.simulated_disk import damage_log

if TYPE_CHECKING:
    from tests.simulation.world import World

log = logging.getLogger(__name__)

HOST, PORT = "127.0.0.1", 9000
URL = f"http://{HOST}:{PORT}"
KEY = "a-client-s-key"
FLOOD_KEY = "another-client-s-key"

#: Seconds between two checks whether it is alive, and before it is restarted.
POLL_S = 1.0


class Gateway:
    """`lives` counts its starts; `down_until` is when it may be restarted. `live` is its scheduler
    while it runs, `service` the HTTP service around it."""

    def __init__(self, world: World, folder: Path, settings: Settings) -> None:
        self.lives = 0
        self.down_until = 0.0
        self.live: LiveScheduler | None = None
        self.service: Service | None = None
        self.disk: MachineDisk | None = None
        self._failing = self._full = self._stopping = False
        self._dying: GatewayDies | None = None
        self._world = world
        self._folder = folder
        self.store = folder / "store-0"
        self._runs = 0  # of its machine
        self._right: Path | None = None  # a copy of a damaged store
        self.settings = settings
        self.instances = [instance.url for instance in world.instances]
        self.process: Process | None = None
        self._working: asyncio.Future[None] | None = None
        self._keys = folder / "keys"
        self._keys.write_text(f"{KEY}\n{FLOOD_KEY}\n")

    async def keep_up(self) -> None:
        """Restart the gateway whenever it has ended, forever."""
        kernel = self._world.kernel
        while True:
            if self.process is None and kernel.time() >= self.down_until:
                self._start()
            elif self.live is not None and self.live.driver.broken is not None:
                self._world.note(f"the gateway is broken: {self.live.driver.broken}")
                self.kill()
            await asyncio.sleep(POLL_S)

    def disk_of(self, folder: Path) -> MachineDisk:
        disk = MachineDisk(folder, str(self._runs), self._crashed_at_a_write)
        disk.fails, disk.free = self._failing, 0 if self._full else None
        self.disk = disk
        return disk

    def kill(self, power: Power | None = None) -> None:
        """Kill it at once; the next process finds what is left on its disk."""
        process = self.forget()
        if process is None:
            return
        self._world.note("the gateway is dead")
        process.kill()
        self._world.network.gone(process, silently=power is not None)
        self._runs += power is not None
        disk, self.disk = self.disk, None
        if disk is not None and self.store.exists():
            disk.dead = True
            after = self._folder / f"store-{self.lives}"
            self.store = disk.left_by_a_crash(after, self._lost(power))

    async def stop(self, *, again: bool = True) -> None:
        """Stop it cleanly; `again`: restart it. A second signal ends it at once."""
        process = self.process
        if process is None or self.live is None:
            return
        if self._stopping:
            self.kill()
            return
        self._stopping = True
        await process.finish(self._close())
        if self.process is process:
            self._world.note("the gateway has stopped")
            self.forget()
            if not again:
                self.down_until = float("inf")
                return
            process.kill()
            self._world.network.gone(process, silently=False)

    def die(self, fault: GatewayDies) -> None:
        """Kill it now, or before one of its next writes."""
        self._dying = fault
        if not fault.writes:
            self._crashed_at_a_write()
        elif self.disk is not None:
            self.disk.crash_in = fault.writes

    def damage_log(self, store: Path, rng: Random) -> None:
        """Damage the log that its death has left. If the store is refused, a right copy is put in
        its place."""
        log = store / f"{ROWS}-wal"
        if log.exists() and log.stat().st_size:
            if self._right is None:
                self._right = shutil.copytree(store, store.with_name(f"{store.name}-right"))
            damage_log(store, rng)

    def set_disk(self, *, full: bool | None = None, failing: bool | None = None) -> None:
        self._full = self._full if full is None else full
        self._failing = self._failing if failing is None else failing
        if self.disk is not None:
            self.disk.free, self.disk.fails = (0 if self._full else None), self._failing

    def _crashed_at_a_write(self) -> None:
        fault = self._dying
        self.down_until = self._world.kernel.time() + fault.for_s
        self.kill(fault.power)

    def _lost(self, power: Power | None) -> Any:
        if power == "dice":
            return Random(f"power/{self._world.plan.seed}/{self.lives}")
        return None if power == "kept" else power

    def _start(self) -> None:
        self.lives += 1
        self._world.network.back(HOST)
        self.process = self._world.spawn("gateway", HOST)
        self.process.start(self._main(self.process))

    async def _main(self, process: Process) -> None:
        try:
            self.live = self._make()
        except Crash:
            return
        except (StoreError, OSError) as error:
            if not process.dead:
                self._world.note(f"the gateway cannot start: {error}")
                self.store = self._right or self.store
                self.process = None
                process.kill()
                if self.disk is not None:
                    self.disk.dead = True
            return
        finally:
            self._right = None
        self.live.driver.pump.observers.append(self._world.observer(self.lives))
        self._working = asyncio.ensure_future(self._work())
        with contextlib.suppress(asyncio.CancelledError):
            await self._working

    def _make(self) -> LiveScheduler:
        """Raises StoreError, OSError or Crash."""
        plan = self._world.plan
        options = Options(
            policy=str(self._world.policy),
            allow_code=True,
            instances=self.instances,
            host=HOST,
            port=PORT,
            api_key_file=self._keys,
            prompts_per_step=plan.prompts_per_step,
            stream_every=plan.stream_every,
            store=self.store,
            grace_s=1.0,
        )
        self.service = Service(options, lambda line: None, settings=self.settings)
        return self.service.live

    async def _work(self) -> None:
        await self.service.open()

    async def _close(self) -> None:
        """Close it as `serve` does."""
        service = self.service
        await self._end_work()
        await service.close()

    async def _end_work(self) -> None:
        """Raises the error with which the work ends."""
        working = self._working
        working.cancel()
        await asyncio.wait({working})
        if not working.cancelled():
            working.result()

    def forget(self) -> Process | None:
        """Drop the process, if there is one, and return it."""
        process, self.process = self.process, None
        self.live = self.service = self._working = None
        self._stopping = False
        return process
