"""A policy at work: the scheduler with its driver, the trainer's desk and the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout_sched.config import PolicyFile
from rollout_sched.journal import SCHEMA, Header
from rollout_sched.live.driver import Driver
from rollout_sched.live.journal_keeper import JournalKeeper
from rollout_sched.live.settings import DEFAULTS, Settings
from rollout_sched.live.trainer_desk import TrainerDesk


class LiveScheduler:
    """What stands between a trainer and its fleet. Make it inside a running event loop.

    prompts_per_step  groups in a batch
    version           the trainer's version at the start
    stream_every      see `TrainerDesk`
    journal           a new file to record every event in
    """

    def __init__(
        self,
        policy: PolicyFile,
        prompts_per_step: int,
        *,
        version: int = 0,
        seed: int = 0,
        stream_every: int = 0,
        journal: Path | None = None,
        settings: Settings = DEFAULTS,
    ) -> None:
        scheduler = policy.scheduler(prompts_per_step, version=version, seed=seed)
        self.journal: JournalKeeper | None = None
        if journal is not None:
            header = Header(SCHEMA, policy.name, prompts_per_step, version, seed)
            self.journal = JournalKeeper(journal, header)
        self.driver = Driver(scheduler, settings=settings)
        if self.journal is not None:
            self.driver.observers.append(self.journal.observe)
        self.desk = TrainerDesk(self.driver, stream_every=stream_every)

    def state(self) -> dict[str, Any]:
        """The queues, versions and anomalies of the scheduler.

        "loaded": every instance that is here, and at least one, has loaded the newest version.
        """
        scheduler, progress = self.driver.scheduler, self.driver.scheduler.progress
        return {
            "version": progress.version,
            "fleet_version": progress.fleet_version,
            "loaded": self.desk.has_loaded(progress.version),
            "prompts_per_step": progress.prompts_per_step,
            "requests": {
                "in_flight": len(scheduler.fleet.attempts),
                "waiting": len(scheduler.waiting),
                "parked": len(scheduler.replay_buffer),
            },
            "groups": {
                "fresh": progress.fresh,
                "active": progress.active,
                "deferred": progress.deferred,
                "complete": progress.complete,
                "delivered": progress.delivered,
            },
            "batches": progress.batches,
            "trainer_waiting": progress.trainer_waiting,
            "closed": progress.closed,
            "instances": len(self.driver.attendants),
            "joined": len(scheduler.fleet.instances),
            "anomalies": dict(scheduler.anomalies),
            "broken": None if self.driver.broken is None else str(self.driver.broken),
        }

    async def close(self) -> None:
        """Stop; instances are left as they are."""
        await self.driver.close()
        if self.journal is not None:
            self.journal.close()
