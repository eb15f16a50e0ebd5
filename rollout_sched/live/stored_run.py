"""A run in a store: opens it, continues an earlier run from it, and keeps writing it."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import Any

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.errors import CallerError
from rollout_sched.core.run_state import GroupFacts, RequestFacts
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.live import stored_facts as facts
from rollout_sched.live.driver import Driver
from rollout_sched.live.payloads import TokenPayload
from rollout_sched.live.recovery import recover
from rollout_sched.live.restored_payloads import RestoredPayloads
from rollout_sched.live.samples import Prompt
from rollout_sched.live.stale_attempts import StaleAttempts
from rollout_sched.live.store_keeper import StoreKeeper
from rollout_sched.live.stored_facts import ONE, StoredWeights
from rollout_sched.live.stored_transcripts import StoredTranscripts
from rollout_sched.live.tools import NamedTools
from rollout_sched.live.trainer_session import TrainerSession
from rollout_sched.store.changes import Transaction
from rollout_sched.store.store import Durable, Store

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
        self.keeper: StoreKeeper
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

    @property
    def weights(self) -> StoredWeights | None:
        """The newest weights published in an earlier epoch."""
        return self._found.weights

    def begin(self, scheduler: Scheduler, driver: Driver) -> None:
        """Write all events to the store from now on."""
        self.keeper = StoreKeeper(
            self.store, scheduler, driver.front.payloads, self._transcripts, driver.pump.fail
        )
        driver.pump.observers.insert(0, self.keeper.observe)
        driver.fleet.record = self.keeper
        self.keeper.take_up(self._found)

    def go_on(self, driver: Driver, trainer: TrainerSession) -> None:
        """Continue from what the earlier epoch has left."""
        found = self._found
        event = found.event
        if event is None:
            return
        make = partial(self._payload, trainer)
        trainer.restore(found, RestoredPayloads(found, self._transcripts, make))
        self._stale_attempts = StaleAttempts(driver, self._run_id(self.epoch - 1), found.running)
        driver.restore(event, found.paused, found.model)
        if found.weights is not None:
            driver.versions.published()
        assert found.state is not None
        for group in found.state.groups:
            for request in group.requests:
                turn = _turn(group, request)
                if driver.view.is_acting(turn.request, turn.attempt):
                    driver.front.tools.take_up(turn)

    def state(self) -> dict[str, Any]:
        """ "full": why no new work is accepted; "broken": why the run has stopped; "" if not."""
        broken = self.keeper.writer.broken
        return {
            "path": str(self.store.folder),
            "run": self._name,
            "epoch": self.epoch,
            "durable": self.store.durable,
            "live_bytes": self.store.live_bytes,
            "disk_bytes": self.store.disk_bytes,
            "full": self.keeper.writer.full,
            "broken": "" if broken is None else str(broken),
            "lost": self.store.losses.told(),
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
        tool = None if name is None else self._tools.of(name)
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
        f"{group.group}/{request.index}",
        request.last_attempt,
        request.last_instance or "",
        group.prompt_tokens + request.response_tokens + request.observed_tokens,
        0,
        request.salt or 0,
        turn=request.turn - 1,
        group=group.group,
        index=request.index,
    )
