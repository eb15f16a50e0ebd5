"""The records of a run: its journal, its store, and the response lengths of its prompts."""

from __future__ import annotations

from typing import Any

from rollout_sched.core.scheduler import Scheduler
from rollout_sched.journal import JournalHeader
from rollout_sched.live.driver import Driver
from rollout_sched.live.journal_keeper import JournalKeeper
from rollout_sched.live.length_store import LengthStore
from rollout_sched.live.run_options import RunOptions
from rollout_sched.live.stored_facts import StoredWeights
from rollout_sched.live.stored_run import JOURNAL_BYTES, StoredRun
from rollout_sched.live.tools import NamedTools
from rollout_sched.live.trainer_session import TrainerSession
from rollout_sched.store.store import Durable


class RunRecords:
    """Each record only if `run` has the option; a run in a store has a journal there, too.

    Order of use, as for `StoredRun`: create it before the driver, call `begin` between the driver
    and the trainer's session, and `go_on` after both. Create it inside a running event loop. Raises
    CallerError, StoreError.
    """

    def __init__(
        self,
        run: RunOptions,
        header: JournalHeader,
        durable: Durable,
        tools: NamedTools,
        *,
        judges: bool,
    ) -> None:
        self.lengths = None if run.length_history is None else LengthStore(run.length_history)
        self.journal = None if run.journal is None else JournalKeeper(run.journal, header)
        self.stored: StoredRun | None = None
        if run.store is not None:
            self.stored = stored = StoredRun(run.store, durable, tools, judges=judges)
            if self.journal is None:
                self.journal = JournalKeeper(stored.journal(), header, bound=JOURNAL_BYTES)

    @property
    def run_id(self) -> str:
        """The id of this epoch of a run in a store; "" without a store."""
        return "" if self.stored is None else self.stored.run_id

    @property
    def weights(self) -> StoredWeights | None:
        """The newest weights published in an earlier epoch."""
        return None if self.stored is None else self.stored.weights

    def begin(self, scheduler: Scheduler, driver: Driver) -> None:
        """Record all events from now on."""
        if self.stored is not None:
            self.stored.begin(scheduler, driver)
        if self.journal is not None:
            driver.pump.observers.append(self.journal.observe)

    def go_on(self, driver: Driver, trainer: TrainerSession) -> None:
        """Continue from what an earlier epoch has left."""
        if self.stored is not None:
            self.stored.go_on(driver, trainer)

    def state(self) -> dict[str, Any]:
        """The state of each record; None for one that is not kept."""
        return {
            "store": None if self.stored is None else self.stored.state(),
            "journal": None if self.journal is None else self.journal.state(),
            "length_history": None if self.lengths is None else self.lengths.state(),
        }

    async def close(self) -> None:
        """Write the rest."""
        if self.stored is not None:
            await self.stored.close()
        if self.journal is not None:
            await self.journal.close()
        if self.lengths is not None:
            await self.lengths.close()
