"""A run in a store: opens it, continues an earlier run from it, and keeps writing it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import partial
from pathlib import Path
from typing import Any

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import InstanceJoined
from rollout_sched.core.model.records import GroupFacts, RequestFacts
from rollout_sched.core.model.request_ids import request_id
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.live.driver import Driver
from rollout_sched.live.durable.recorder import RunRecorder
from rollout_sched.live.durable.recovery import RestoredPayloads, recover
from rollout_sched.live.ports import with_timeout
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.trainer import records as facts
from rollout_sched.live.trainer.records import ONE, StoredTranscripts
from rollout_sched.live.trainer.samples import NamedTools, Prompt
from rollout_sched.live.trainer.session import TrainerSession
from rollout_sched.live.trainer.stored import StoredWeights
from rollout_sched.store import Durable, Store
from rollout_sched.store.transaction import Transaction

log = logging.getLogger(__name__)


class StaleAttempts:
    """Aborts the attempts of an earlier run that an instance may still work on, when it joins. No
    attempt of this run has their numbers, so their answers would be ignored.

    `running`: (instance, attempt); `run_id`: of the earlier run (see `live.driver`).
    """

    def __init__(self, driver: Driver, run_id: str, running: list[tuple[str, int]]) -> None:
        self._driver = driver
        self._orders: dict[str, list[str]] = {}
        for instance, attempt in running:
            self._orders.setdefault(instance, []).append(f"{run_id}-{attempt}")
        self._aborting: set[asyncio.Task[None]] = set()
        driver.pump.watch(self._joined, InstanceJoined)

    def close(self) -> None:
        for task in self._aborting:
            task.cancel()

    def _joined(self, event: InstanceJoined) -> None:
        orders = self._orders.pop(event.instance, None)
        if orders:
            task = asyncio.ensure_future(self._abort(event.instance, orders))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _abort(self, instance: str, orders: list[str]) -> None:
        """Each abort is sent once: an attempt that is not stopped finishes, which only costs
        time."""
        client = self._driver.supervisors[instance].client
        limit_s = self._driver.settings.control_timeout_s
        for order in orders:
            try:
                await with_timeout(client.abort(order), limit_s)
            except Exception as error:
                log.warning("%s of an earlier run on %s: %s", order, instance, error)


#: Number of kept journal files of earlier epochs, and bytes of one.
JOURNALS = 4
JOURNAL_BYTES = 2**28


class StoredRun:
    """The store of a run. Order of use: create it before the driver, call `begin` between the
    driver and the trainer's session, and `go_on` after both. Create it inside a running event loop.
    Raises StoreError.

    `run_id` is this epoch's id; it begins with the run's name, which is the same in all epochs.
    `tools`: of trajectories that continue. `judges`: whether there is a reward function; without
    one, groups that must be judged cannot be continued.
    """

    def __init__(
        self, folder: Path, durable: Durable, tools: NamedTools, *, judges: bool = False
    ) -> None:
        self.store = Store(folder, durable=durable)
        self._tools = tools
        try:
            self._transcripts = StoredTranscripts(self.store)
            self._found = recover(self.store, self._transcripts, tools)
            self._check_judge(judges)
            self._name = self._name_of_run()
        except BaseException:
            self.store.close()
            raise
        self.keeper: RunRecorder
        self._stale_attempts: StaleAttempts | None = None

    @property
    def epoch(self) -> int:
        return self.store.epoch

    @property
    def run_id(self) -> str:
        return self._run_id(self.epoch)

    def journal(self) -> Path:
        """A new file for the events of this epoch; the files of the last epochs stay, to show what
        happened before a crash."""
        folder = self.store.folder / "journal"
        folder.mkdir(exist_ok=True)
        for old in sorted(folder.iterdir())[:-JOURNALS]:
            old.unlink()
        return folder / f"{self.epoch:08d}.jsonl"

    def rename_last(self, journal: Path) -> None:
        """Rename what the last epoch wrote to this file, outside of the store, to `<file>.<its
        epoch>`: the command that started it can start it again."""
        last = Path(f"{journal}.{self.epoch - 1}")
        if self.epoch > 1 and journal.exists() and not last.exists():
            journal.rename(last)

    @property
    def weights(self) -> StoredWeights | None:
        """The newest weights published in an earlier epoch."""
        return self._found.weights

    def begin(self, scheduler: Scheduler, driver: Driver) -> None:
        """Write all events to the store from now on."""
        self.keeper = RunRecorder(
            self.store, scheduler, driver.front.payloads, self._transcripts, driver.pump.fail
        )
        driver.pump.observers.insert(0, self.keeper.observe)
        driver.fleet.record = self.keeper
        self.keeper.restore(self._found)

    def resume(self, driver: Driver, trainer: TrainerSession) -> None:
        """Continue from what the earlier epoch has left."""
        found = self._found
        event = found.event
        if event is None:
            return
        make = partial(self._payload, trainer)
        earlier = RestoredPayloads(found, self._transcripts, make)
        trainer.restore(found, earlier.batches(), earlier.factories())
        self._stale_attempts = StaleAttempts(driver, self._run_id(self.epoch - 1), found.running)
        driver.restore(event, found.paused, found.model)
        if found.weights is not None:
            driver.versions.published()
        assert found.state is not None
        for group in found.state.groups:
            for request in group.requests:
                turn = _turn(group, request)
                if driver.view.is_acting(turn.request, turn.attempt):
                    driver.front.tools.restore(turn)

    def state(self) -> dict[str, Any]:
        """ "full": why no new work is accepted; "broken": why the run has stopped; "" if not.
        "hangs_s": seconds for which the disk has not answered."""
        broken = self.keeper.writer.broken
        return {
            "path": str(self.store.folder),
            "run": self._name,
            "epoch": self.epoch,
            "durable": self.store.durable,
            "live_bytes": self.store.live_bytes,
            "disk_bytes": self.store.disk_bytes,
            "full": self.keeper.writer.full,
            "hangs_s": self.keeper.writer.hangs_s,
            "broken": "" if broken is None else str(broken),
            "lost": self.store.losses.summary(),
        }

    async def close(self) -> None:
        if self._stale_attempts is not None:
            self._stale_attempts.close()
        await self.keeper.close()

    def _check_judge(self, judges: bool) -> None:
        state = self._found.state
        waiting = [] if state is None else [facts.group for facts in state.groups if facts.judged]
        if waiting and not judges:
            raise CallerError(
                f"store {self.store.folder}: group {waiting[0]!r} waits for its rewards, but there "
                "is no reward function: pass the one that the run began with"
            )

    def _payload(self, trainer: TrainerSession, prompt: Prompt, index: int) -> TokenPayload:
        name = self._found.tools.get(prompt.uid)
        tool = None if name is None else self._tools.tool(name)
        return trainer.submissions.payloads.new(prompt, index, tool)

    def _name_of_run(self) -> str:
        known = self.store.facts(facts.NAME).get(ONE)
        if known is not None:
            return known.decode()
        naming = Transaction()
        name = secrets.token_hex(4)
        naming.put(facts.NAME, ONE, name.encode())
        self.store.apply(naming, promised=True)
        return name

    def _run_id(self, epoch: int) -> str:
        return f"{self._name}e{epoch}"


def _turn(group: GroupFacts, request: RequestFacts) -> Dispatch:
    """The attempt that made the turn for which a tool was running."""
    return Dispatch(
        request_id(group.group, request.index),
        request.last_attempt,
        request.last_instance or "",
        group.prompt_tokens + request.response_tokens + request.observed_tokens,
        0,
        request.salt or 0,
        turn=request.turn - 1,
        group=group.group,
        index=request.index,
    )
