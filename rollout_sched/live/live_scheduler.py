"""Runs a policy: the scheduler with its driver, the trainer session and the journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollout_sched.config import PolicyFile, read_table
from rollout_sched.core import SchedulerView
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.core.state.groups import HERE, JUDGING
from rollout_sched.journal import SCHEMA, JournalHeader
from rollout_sched.live.driver import Driver
from rollout_sched.live.durable.journal import JournalRecorder
from rollout_sched.live.durable.run import JOURNAL_BYTES, StoredRun
from rollout_sched.live.instances.fleet import Borrower
from rollout_sched.live.requests.trajectories import Tool
from rollout_sched.live.settings import RunOptions, Settings
from rollout_sched.live.trainer.lengths import LengthStore
from rollout_sched.live.trainer.rewards import KeepFunc, RewardFunc, reward_function_of
from rollout_sched.live.trainer.samples import NamedTools
from rollout_sched.live.trainer.session import TrainerSession
from rollout_sched.live.trainer.stored import StoredWeights
from rollout_sched.store import Durable

log = logging.getLogger(__name__)


def scheduler_state(view: SchedulerView) -> dict[str, Any]:
    """The state of a scheduler, for people and programs that ask. Queues, versions and anomalies.
    `joined` are the instances that belong to the fleet."""
    run = view.run
    return {
        "version": run.version,
        "fleet_version": run.fleet_version,
        "prompts_per_step": run.prompts_per_step,
        "requests": {
            "in_flight": view.in_flight,
            "waiting": view.waiting,
            "parked": view.parked,
        },
        "sessions": {"known": view.sessions, "moves": view.session_moves},
        "groups": {
            **{str(state): view.groups(state) for state in HERE},
            "delivered": run.delivered,
        },
        "batches": run.batches,
        "in_batch": run.in_batch,
        "trainer_waiting": run.trainer_waiting,
        "closed": run.closed,
        "joined": len(view.instances),
        "anomalies": dict(view.anomalies),
    }


# ------------------------------------------------------------------------------------------
# Says in one line what is missing when a trainer waits for something that needs its action.


def batch(driver: Driver) -> str:
    """What the next batch lacks; "" if it is being made, or there is nothing left to make."""
    view, run = driver.view, driver.view.run
    if not view.instances:
        return _nobody(driver)
    if view.in_flight or run.updating:
        return ""
    if view.waiting:
        return f"{view.waiting} requests wait for an available instance: {_fleet(driver)}"
    if driver.front.tools:
        return f"tools of {len(driver.front.tools)} trajectories have not returned"
    if view.groups(JUDGING):
        return f"rewards of {view.groups(JUDGING)} groups are not computed yet"
    if run.closed and not any(view.groups(state) for state in HERE):
        return ""
    here = sum(view.groups(state) for state in HERE)
    prompts = "" if run.closed else "more prompts, or close_submissions()"
    newer = f"weights after version {run.version}" if run.batches else ""
    asked = ", or ".join(filter(None, (prompts, newer)))
    return (
        f"a batch needs {run.prompts_per_step} groups, {here} are here and nothing runs; missing: "
        f"{asked}"
    )


def weights(driver: Driver) -> str:
    """Why the newest version is not loaded everywhere; "" if nothing is missing."""
    view, newest = driver.view, driver.view.run.version
    if not view.instances:
        return _nobody(driver)
    if view.run.updating:
        return ""
    behind = any(instance.version < newest for instance in view.instances)
    return f"not every instance has loaded it: {_fleet(driver)}" if behind else ""


def _nobody(driver: Driver) -> str:
    """Why no instance has joined."""
    away = [f"{name} ({one.reason})" for name, one in driver.supervisors.items()]
    return f"no instance has joined: {', '.join(away) or 'none is known; call add_instance(url)'}"


def _fleet(driver: Driver) -> str:
    return ", ".join(
        f"{instance.id} is {instance.status} at version {instance.version}"
        for instance in driver.view.instances
    )


class RunRecords:
    """The records of a run: its journal, its store, and the response lengths of its prompts. Each
    record only if `run` has the option; a run in a store has a journal in it, too.

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
        self.journal: JournalRecorder | None = None
        self.stored: StoredRun | None = None
        if run.store is not None:
            self.stored = stored = StoredRun(run.store, durable, tools, judges=judges)
            if run.journal is None:
                self.journal = JournalRecorder(stored.journal(), header, bound=JOURNAL_BYTES)
            else:
                stored.rename_last(run.journal)
        if run.journal is not None:
            # A store gives each epoch a file of its own, whose name would clash with a full one's.
            bound = run.journal_mb * 2**20 if run.store is None else 0
            self.journal = JournalRecorder(run.journal, header, bound=bound or None)

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

    def resume(self, driver: Driver, trainer: TrainerSession) -> None:
        """Continue from what an earlier epoch has left."""
        if self.stored is not None:
            self.stored.resume(driver, trainer)

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


#: Seconds between two checks of the streams of a stored run.
STREAM_S = 0.5


def settings_of(policy: PolicyFile, given: Mapping[str, Any] | None = None) -> Settings:
    """The settings `given`, else those of the policy's [live] table, else the defaults.

    Raises ConfigError naming the key.
    """
    file = read_table(policy.name, "live", policy.live, Settings)
    return msgspec.structs.replace(file, **(given or {}))


def _streaming(settings: Settings, run: RunOptions) -> Settings:
    """With a store, report streams to the core, because only reported tokens are stored."""
    if run.store is not None and run.stream_every and not settings.stream_s:
        return msgspec.structs.replace(settings, stream_s=STREAM_S)
    return settings


def _warn_of_lending(policy: PolicyFile) -> None:
    log.warning(
        "policy %s lends instances to a trainer on their GPUs, but there is none: nothing will be "
        "lent; pass the trainer as `borrower` of from_toml",
        policy.name,
    )


class LiveScheduler:
    """Stands between a trainer and its fleet. Create it inside a running event loop.

    `settings`: of the driver; None: those of the policy. `borrower`: the trainer, if instances are
    lent to it. `reward`, `keep`: see `reward_function`; None: those of the policy. `tools`: by
    name, the tools of trajectories that survive this process.
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
        settings = settings or settings_of(policy)
        rewards = reward_function_of(policy, reward, keep)
        run = options or RunOptions()
        adopts = run.start_version == "auto"
        version = 0 if run.start_version == "auto" else run.start_version
        scheduler = policy.scheduler(run.prompts_per_step, version=version, seed=run.seed)
        if scheduler.roles.lending.lends and borrower is None:
            _warn_of_lending(policy)
        self.policy = policy.name
        self.fronts: Callable[[], dict[str, Any]] = dict
        header = JournalHeader(
            SCHEMA, policy.name, run.prompts_per_step, version, run.seed, tables=policy.tables
        )
        self.records = records = RunRecords(
            run, header, settings.durable, named_tools, judges=rewards is not None
        )
        settings = _streaming(settings, run)
        self.driver = Driver(scheduler, settings=settings, adopts=adopts, run_id=records.run_id)
        records.begin(scheduler, self.driver)
        stored = records.stored
        self.trainer = TrainerSession(
            self.driver,
            stream_every=run.stream_every,
            lengths=records.lengths,
            borrower=borrower,
            stored=None if stored is None else stored.keeper.session,
            rewards=rewards,
            tools=named_tools,
        )
        records.resume(self.driver, self.trainer)

    def state(self) -> dict[str, Any]:
        """The queues, versions and anomalies of the scheduler (`scheduler_state`), and also:

        "contradictions": number of answers with other versions than known of the instance, by kind.
        "failed": failed groups that no batch has reported yet, with the reason; "filtered":
        filtered groups likewise.
        "leases": the leases of unacknowledged batches.
        "mismatch": of the trainer's log-probs and the rollouts', as last reported; else None.
        "loaded": whether all joined instances, and at least one, have loaded the newest version.
        "fronts": the connected fronts and what each holds (`link.host`); empty in one process.
        "waits_for": what the next batch and "loaded" wait for; "" if no action is needed.
        """
        driver, trainer = self.driver, self.trainer
        return {
            "epoch": driver.epoch,
            **scheduler_state(driver.view),
            "loaded": trainer.weights.has_loaded(driver.view.run.version),
            "waits_for": {
                "batch": batch(driver),
                "weights": weights(driver),
            },
            **trainer.submissions.summary(),
            "leases": trainer.batches.summary(),
            "mismatch": None if trainer.mismatch is None else msgspec.to_builtins(trainer.mismatch),
            "lease_s": driver.settings.lease_s,
            "fronts": self.fronts(),
            "instances": len(driver.supervisors),
            "contradictions": dict(driver.versions.contradictions),
            **self.records.state(),
            "broken": None if driver.broken is None else str(driver.broken),
        }

    async def close(self) -> None:
        """Stop; the instances stay as they are."""
        try:
            await self.driver.close()
        finally:
            await self.records.close()
