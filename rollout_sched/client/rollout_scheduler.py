"""What a trainer may do, whoever schedules."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from rollout_sched.client.new_weights import Apply
from rollout_sched.client.prompts import checked
from rollout_sched.client.said_while_waiting import said_while_waiting
from rollout_sched.config import load_policy
from rollout_sched.integrations.ray.deployment import NAME, Deployment, FrontCount
from rollout_sched.live.leases import TRAINER, LeaseEnded
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.ports import InstanceClient
from rollout_sched.live.reward_function import KeepFunc, RewardFunc
from rollout_sched.live.run_options import RunOptions
from rollout_sched.live.samples import Batch, Prompt
from rollout_sched.live.settings import Settings
from rollout_sched.live.trainer_session import Borrower
from rollout_sched.live.trajectory import Tool

if TYPE_CHECKING:
    from rollout_sched.client.blocking import BlockingRollouts
    from rollout_sched.client.on_ray import OnRay

_DEFAULTS = RunOptions()

#: What has been received: the number of a batch, and of the last part of it.
Position = tuple[int | None, int | None]

NOTHING: Position = (None, None)


class RolloutScheduler(ABC):
    """Prompts in, batches out; to be used as `async with`."""

    #: What has been received; it is said when the next batch is asked for.
    _received: Position

    @staticmethod
    def from_toml(
        policy: str | Path,
        instances: Sequence[str | InstanceClient] = (),
        *,
        prompts_per_step: int = _DEFAULTS.prompts_per_step,
        version: int | Literal["auto"] = _DEFAULTS.start_version,
        seed: int = _DEFAULTS.seed,
        stream_every: int = _DEFAULTS.stream_every,
        journal: Path | None = _DEFAULTS.journal,
        store: Path | None = _DEFAULTS.store,
        length_history: Path | None = _DEFAULTS.length_history,
        instance_api_key: str | None = None,
        settings: Settings | None = None,
        borrower: Borrower | None = None,
        reward: RewardFunc | None = None,
        keep: KeepFunc | str | None = None,
        trainer: str = TRAINER,
        tools: Mapping[str, Tool] | None = None,
    ) -> RolloutScheduler:
        """Schedule in this process.

        policy            a TOML file, or the name of a preset
        instances         URLs of vLLM servers, or clients such as InProcessInstance; those that
                          are not up yet join later
        prompts_per_step  groups in a batch
        version           the trainer's version now; "auto": that which the instances say they have
        stream_every      tokens between partial results, so that they survive an instance's death;
                          0 does not stream, which is faster
        journal           a new file to record every event in
        store             a folder in which the run outlives this process: one that is there is gone
                          on with, else one begins
        length_history    a file for the response lengths of prompts, kept from one run to the next
        settings          of the driver; None for the policy's [live] table
        borrower          the trainer, if it shares the instances' GPUs and begins on those that are
                          lent to it ([lending]) with the parts that it has
        reward            what a finished sample is worth: a coroutine function of the Sample, or a
                          plain one, that returns a number or numbers by name; None for that of the
                          policy's [rewards] table, which bounds either
        keep              whether a group is trained, by its samples with their rewards, or the name
                          of a shipped one; None likewise
        trainer           whose batches are leased; the same name after a restart
        tools             by name: the tools of trajectories that are to go on from a store, given
                          by whoever takes it up under the same names

        Raises ConfigError.
        """
        loaded = load_policy(str(policy))
        options = RunOptions(
            prompts_per_step=prompts_per_step,
            start_version=version,
            seed=seed,
            stream_every=stream_every,
            journal=journal,
            store=store,
            length_history=length_history,
        )

        from rollout_sched.client.in_process import InProcess  # which inherits from this class

        start = partial(
            LiveScheduler,
            loaded,
            options,
            settings=settings,
            borrower=borrower,
            reward=reward,
            keep=keep,
            tools=tools,
        )
        return InProcess(start, instances, instance_api_key, trainer)

    @staticmethod
    def connect(url: str, *, key: str | None = None, trainer: str = TRAINER) -> RolloutScheduler:
        """Use the gateway at `url`; without a key it must be on this machine. A trainer's key does
        for all but adding and removing instances, which takes an administrator's.

        By its --admin-socket: unix:///path/of/the/socket. `trainer`: a name for each that takes
        batches of its own, the same after its restart.
        """
        from rollout_sched.client.remote import Remote  # which inherits from this class
        from rollout_sched.integrations.gateway.control_plane.trainer_client import TrainerClient

        return Remote(partial(TrainerClient, url, key), trainer)

    @staticmethod
    def on_ray(
        policy: str | Path | None = None,
        instances: Sequence[str] = (),
        *,
        name: str = NAME,
        fronts: FrontCount = "per-node",
        servers: str = "",
        serve_apps: str = "",
        shared_store: bool = False,
        address: str | None = None,
        trainer: str = TRAINER,
        **options: Any,
    ) -> OnRay:
        """Use the deployment of this name on a Ray cluster, as `rollout-sched ray up` starts it.
        With a `policy` it is started if it is not there, and stays.

        instances     URLs of vLLM servers
        fronts        "per-node", or how many (`integrations.ray.deployment`)
        servers       named actors that are vLLM servers, as a pattern
        serve_apps    Ray Serve applications whose replicas are vLLM servers, as a pattern
        shared_store  every node has the folder `store`
        address       of the cluster; None: the one that this process is connected to, else that of
                      this machine
        options       as of `rollout-sched serve`: prompts_per_step, store, endpoints, ...

        Whoever asks it for `next_micro_batches` gets object references to arrays. Raises
        CallerError.
        """
        from rollout_sched.client.on_ray import on_ray  # which inherits from this class

        deployment = Deployment(
            name=name,
            fronts=fronts,
            servers=servers,
            serve_apps=serve_apps,
            shared_store=shared_store,
        )
        return on_ray(deployment, policy, list(instances), options, address, trainer)

    def blocking(self) -> BlockingRollouts:
        """The same without coroutines, to be used as `with`: for a trainer without an event
        loop."""
        from rollout_sched.client.blocking import (
            BlockingRollouts,
        )  # which calls this class's methods

        return BlockingRollouts(self)

    async def submit(self, prompts: Iterable[Prompt], *, tool: Tool | None = None) -> None:
        """Queue groups. Raises CallerError at the first that cannot be; those before it stay.

        Token ids may come as lists, or as arrays of integers (numpy, torch).

        A group that is here already, with the same prompt, is taken once.

        With a `tool`, a coroutine function, each sample is a trajectory of several turns: after
        each turn the tool is called with the `Trajectory` and returns the token ids that follow,
        or None when it is over. `max_tokens` bounds what is generated in all turns together. Only
        `from_toml` offers it: a coroutine cannot travel.
        """
        await self._submit(checked(prompts), tool)

    @abstractmethod
    async def _submit(self, prompts: Iterable[Prompt], tool: Tool | None) -> None:
        """With prompts that are well formed."""

    @abstractmethod
    async def close_submissions(self) -> None:
        """No more prompts will come: the last batches may be short, and `batches` ends."""

    async def next_batch(self, *, parts: bool = False) -> Batch | None:
        """The next batch, waited for; None when submissions are closed and nothing is left.

        With `parts` what of it is whole, where the policy delivers in parts (`part_prompts`); it is
        asked for again until a part is the last. Without, all that has not been asked for in parts.
        What it waits for is logged where that does not come by itself.

        What was received last counts as trained then. Raises LeaseEnded if another trainer has it,
        for this one was not heard of for so long: what was made of it must not count. What is asked
        for next is a batch of this trainer's own.
        """
        async with self._waiting_for_batch():
            return await self._next_batch(parts)

    @abstractmethod
    async def _next_batch(self, parts: bool) -> Batch | None: ...

    def acknowledge(self, batch: int) -> None:
        """A trainer that goes on from a checkpoint has trained up to the batch of this number: what
        is asked for next is what follows it, where the scheduler has kept that."""
        self._received = batch, None

    async def publish_weights(self, version: int, apply: Apply, *, wait: bool = False) -> None:
        """Version `version` is ready; with `wait`, until every instance that is here, and at least
        one, computes with it.

        Raises CallerError if versions do not grow, or a checkpoint is not there.
        """
        async with said_while_waiting(f"version {version}", partial(self._awaited, "weights")):
            await self._publish_weights(version, apply, wait)

    @abstractmethod
    async def _publish_weights(self, version: int, apply: Apply, wait: bool) -> None: ...

    @abstractmethod
    async def give_back(self, url: str) -> None:
        """The trainer uses an instance no longer that was lent to it (see `borrower`); to be said
        before the weights are published, so that all get them together. Raises CallerError if it
        is not lent, or was lost since. Only `from_toml` offers it."""

    @abstractmethod
    async def add_instance(self, instance: str | InstanceClient) -> None:
        """Take in a vLLM server that is up. Raises CallerError if it is here already,
        InstanceError or GatewayError if it does not answer."""

    @abstractmethod
    async def remove_instance(self, url: str, *, drain: bool = False) -> None:
        """Let an instance go; what it holds goes on elsewhere, or with `drain` is finished first.

        Over HTTP a drain goes on after this returns.
        """

    @abstractmethod
    async def state(self) -> dict[str, Any]:
        """Queues, versions and anomalies."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *error: object) -> None: ...

    async def _awaited(self, what: Literal["batch", "weights"]) -> str:
        reason: str = (await self.state())["waits_for"][what]
        return reason

    @contextlib.asynccontextmanager
    async def _waiting_for_batch(self) -> AsyncIterator[None]:
        """Its reason is logged; whose lease has ended has received nothing."""
        try:
            async with said_while_waiting("a batch", partial(self._awaited, "batch")):
                yield
        except LeaseEnded:
            self._received = NOTHING
            raise

    async def batches(self) -> AsyncIterator[Batch]:
        """Batches until submissions are closed and nothing is left; may be left and taken up."""
        while (batch := await self.next_batch()) is not None:
            yield batch

    async def parts(self) -> AsyncIterator[Batch]:
        """The same batches as their groups become whole: accumulate gradients over the parts, and
        take the optimiser's step at the `last` one, before which no weights may be published."""
        while (part := await self.next_batch(parts=True)) is not None:
            yield part
