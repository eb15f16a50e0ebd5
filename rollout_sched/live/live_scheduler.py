"""A policy at work: the scheduler with its driver, the trainer session and the journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollout_sched.config import PolicyFile, read_table
from rollout_sched.core.groups import HERE
from rollout_sched.journal import SCHEMA, JournalHeader
from rollout_sched.live import awaited
from rollout_sched.live.driver import Driver
from rollout_sched.live.journal_keeper import JournalKeeper
from rollout_sched.live.length_store import LengthStore
from rollout_sched.live.reward_function import KeepFunc, RewardFunc, reward_function_of
from rollout_sched.live.run_options import RunOptions
from rollout_sched.live.settings import Settings
from rollout_sched.live.stored_run import JOURNAL_BYTES, StoredRun
from rollout_sched.live.tools import NamedTools
from rollout_sched.live.trainer_session import Borrower, TrainerSession
from rollout_sched.live.trajectory import Tool

log = logging.getLogger(__name__)

#: Seconds between two looks at the streams of a run that is stored.
STREAM_S = 0.5


def settings_of(policy: PolicyFile, given: Mapping[str, Any] | None = None) -> Settings:
    """What is `given`, else what the policy's [live] table says, else the defaults.

    Raises ConfigError naming the key.
    """
    file = read_table(policy.name, "live", policy.live, Settings)
    return msgspec.structs.replace(file, **(given or {}))


def _streaming(settings: Settings, run: RunOptions) -> Settings:
    """What streams bring is stored as far as the core has heard of it."""
    if run.stream_every and not settings.stream_s:
        return msgspec.structs.replace(settings, stream_s=STREAM_S)
    return settings


class LiveScheduler:
    """What stands between a trainer and its fleet. Make it inside a running event loop.

    `settings`: of the driver; None for those of the policy. `borrower`: the trainer, if it takes
    instances that are lent to it. `reward`, `keep`: see `reward_function`; None for those of the
    policy. `tools`: by name, of trajectories that survive this process.
    """

    def __init__(
        self,
        policy: PolicyFile,
        options: RunOptions | None = None,
        *,
        settings: Settings | None = None,
        borrower: Borrower | None = None,
        reward: RewardFunc | None = None,
        keep: KeepFunc | str | None = None,
        tools: Mapping[str, Tool] | None = None,
    ) -> None:
        named_tools = NamedTools(tools or {})
        if settings is None:
            settings = settings_of(policy)
        rewards = reward_function_of(policy, reward, keep)
        run = options or RunOptions()
        groups, adopts = run.prompts_per_step, run.start_version == "auto"
        version = 0 if run.start_version == "auto" else run.start_version
        scheduler = policy.scheduler(groups, version=version, seed=run.seed)
        if scheduler.roles.lending.lends and borrower is None:
            log.warning(
                "policy %s lends instances to a trainer on their GPUs, and there is none: nothing "
                "will be lent; a trainer that takes them is given as `borrower` of from_toml",
                policy.name,
            )
        self.policy = policy.name
        self.fronts: Callable[[], dict[str, Any]] = dict
        self.seed = run.seed
        self.lengths: LengthStore | None = None
        if run.length_history is not None:
            self.lengths = LengthStore(run.length_history)
        header = JournalHeader(SCHEMA, policy.name, groups, version, run.seed)
        self.journal = None if run.journal is None else JournalKeeper(run.journal, header)
        self.stored: StoredRun | None = None
        if run.store is not None:
            self.stored = StoredRun(
                run.store, settings.durable, named_tools, judges=rewards is not None
            )
            settings = _streaming(settings, run)
            if self.journal is None:
                self.journal = JournalKeeper(self.stored.journal(), header, bound=JOURNAL_BYTES)
        run_id = "" if self.stored is None else self.stored.run_id
        self.driver = Driver(scheduler, settings=settings, adopts=adopts, run_id=run_id)
        if self.stored is not None:
            self.stored.begin(scheduler, self.driver)
        if self.journal is not None:
            self.driver.pump.observers.append(self.journal.observe)
        self.trainer = TrainerSession(
            self.driver,
            stream_every=run.stream_every,
            seed=run.seed,
            lengths=self.lengths,
            borrower=borrower,
            stored=None if self.stored is None else self.stored.keeper.session,
            rewards=rewards,
            tools=named_tools,
        )
        if self.stored is not None:
            self.stored.go_on(self.driver, self.trainer)

    def state(self) -> dict[str, Any]:
        """The queues, versions and anomalies of the scheduler.

        "contradictions": answers by other versions than were known of their instance, by kind.
        "failed": why, of the groups of which no batch has told yet; "filtered": those likewise.
        "leases": of the batches that are not acknowledged, whose they are.
        "loaded": every instance that is here, and at least one, has loaded the newest version.
        "fronts": those that are connected, and what each has (`link.hub`); empty in one process.
        "waits_for": what is missing for the next batch, and for "loaded"; "" if it comes by itself.
        """
        view, progress = self.driver.view, self.driver.view.run
        return {
            "epoch": self.driver.epoch,
            "version": progress.version,
            "fleet_version": progress.fleet_version,
            "loaded": self.trainer.has_loaded(progress.version),
            "waits_for": {
                "batch": awaited.batch(self.driver),
                "weights": awaited.weights(self.driver),
            },
            "prompts_per_step": progress.prompts_per_step,
            "requests": {
                "in_flight": view.in_flight,
                "waiting": view.waiting,
                "parked": view.parked,
            },
            "sessions": {"known": view.sessions, "moves": view.session_moves},
            "groups": {
                **{str(state): view.groups(state) for state in HERE},
                "delivered": progress.delivered,
            },
            "batches": progress.batches,
            "failed": {
                group.uid: group.reason
                for group in self.trainer.submissions.lost
                if group.reason is not None
            },
            "filtered": [
                group.uid for group in self.trainer.submissions.lost if group.reason is None
            ],
            "leases": self.trainer.batches.told(),
            "lease_s": self.driver.settings.lease_s,
            "in_batch": progress.in_batch,
            "trainer_waiting": progress.trainer_waiting,
            "closed": progress.closed,
            "fronts": self.fronts(),
            "instances": len(self.driver.supervisors),
            "joined": len(view.instances),
            "anomalies": dict(view.anomalies),
            "contradictions": dict(self.driver.versions.contradictions),
            "store": None if self.stored is None else self.stored.state(),
            "journal": self._journal_state(),
            "length_history": self._lengths_state(),
            "broken": None if self.driver.broken is None else str(self.driver.broken),
        }

    def _journal_state(self) -> dict[str, str] | None:
        """ "broken": why it ends before now; "" while it does not."""
        if self.journal is None:
            return None
        return {"path": str(self.journal.path), "broken": self.journal.broken}

    def _lengths_state(self) -> dict[str, Any] | None:
        """ "broken": why it could not be written when that was last tried."""
        if self.lengths is None:
            return None
        store = self.lengths
        return {"path": str(store.path), "prompts": len(store), "broken": store.broken}

    async def close(self) -> None:
        """Stop; instances are left as they are."""
        try:
            await self.driver.close()
        finally:
            if self.stored is not None:
                await self.stored.close()
            if self.journal is not None:
                await self.journal.close()
            if self.lengths is not None:
                await self.lengths.close()
