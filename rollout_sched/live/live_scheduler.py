"""Runs a policy: the scheduler with its driver, the trainer session and the journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollout_sched.config import PolicyFile, read_table
from rollout_sched.journal import SCHEMA, JournalHeader
from rollout_sched.live import wait_reasons
from rollout_sched.live.driver import Driver
from rollout_sched.live.reward_function import KeepFunc, RewardFunc, reward_function_of
from rollout_sched.live.run_options import RunOptions
from rollout_sched.live.run_records import RunRecords
from rollout_sched.live.scheduler_state import scheduler_state
from rollout_sched.live.settings import Settings
from rollout_sched.live.tools import NamedTools
from rollout_sched.live.trainer_session import Borrower, TrainerSession
from rollout_sched.live.trajectory import Tool

log = logging.getLogger(__name__)

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
        self.seed = run.seed
        header = JournalHeader(SCHEMA, policy.name, run.prompts_per_step, version, run.seed)
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
            seed=run.seed,
            lengths=records.lengths,
            borrower=borrower,
            stored=None if stored is None else stored.keeper.session,
            rewards=rewards,
            tools=named_tools,
        )
        records.go_on(self.driver, self.trainer)

    def state(self) -> dict[str, Any]:
        """The queues, versions and anomalies of the scheduler (`scheduler_state`), and also:

        "contradictions": number of answers with other versions than known of the instance, by kind.
        "failed": failed groups that no batch has reported yet, with the reason; "filtered":
        filtered groups likewise.
        "leases": the leases of unacknowledged batches.
        "loaded": whether all joined instances, and at least one, have loaded the newest version.
        "fronts": the connected fronts and what each holds (`link.hub`); empty in one process.
        "waits_for": what the next batch and "loaded" wait for; "" if no action is needed.
        """
        driver, trainer = self.driver, self.trainer
        return {
            "epoch": driver.epoch,
            **scheduler_state(driver.view),
            "loaded": trainer.weights.has_loaded(driver.view.run.version),
            "waits_for": {
                "batch": wait_reasons.batch(driver),
                "weights": wait_reasons.weights(driver),
            },
            **trainer.submissions.told(),
            "leases": trainer.batches.told(),
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
