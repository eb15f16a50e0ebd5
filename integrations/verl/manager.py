"""Classes for verl's `agent_loop_manager_class`: its agent loops use our scheduler or gateway.

In verl 0.9.1's trainers v1 (`trainer/ppo/v1`) loops run in AgentLoopWorkerTQ, which writes their
results and the progress of their groups to TransferQueue. This stays as it is; only the server that
the loops ask changes.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import ray
import transfer_queue
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollout_sched.client import RolloutScheduler
from rollout_sched.integrations.ray import on_ray
from rollout_sched.integrations.verl.coordinator import Coordinator, Tags
from rollout_sched.integrations.verl.gateway_client import (
    GatewayClient,
    check_text,
    lengths_of,
    room_settings,
)
from rollout_sched.integrations.verl.groups import MASK, SessionGroup, token_output, trained
from rollout_sched.integrations.verl.server_instance import VerlServers
from rollout_sched.integrations.verl.settings import RoomSettings
from rollout_sched.live.trainer.samples import Prompt, Sample

#: verl's training partition of TransferQueue.
_PARTITION = "train"

#: Concurrent calls to the coordinator: one for each group that is not yet delivered. Further calls
#: would wait.
_OPEN_GROUPS = 100_000

#: The group of the current task, and the group and session of the current agent loop; None during
#: validation.
_group: ContextVar[SessionGroup | None] = ContextVar("_group", default=None)
_session: ContextVar[tuple[SessionGroup, int] | None] = ContextVar("_session", default=None)


class GatewayAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent loops, of any kind and any number of turns, with a gateway that generates.

    Each turn is a separate request in the session of its trajectory.
    """

    def __init__(self, config: Any, llm_client: Any, *others: Any, **named: Any) -> None:
        super().__init__(config, GatewayClient(config), *others, **named)


class ScheduledAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent loops of a single turn; their prompts are groups of our scheduler.

    The policy decides which groups run when, what a batch contains and how stale a sample may be.
    The scheduler belongs to a gateway, to a deployment on verl's Ray cluster, or to verl's own job
    with the servers that verl has started. Validation does not use batches: its requests go to the
    gateway or to verl's own client.
    """

    llm_client: Any

    async def _init_agent_loop_workers(self) -> None:
        settings = room_settings(self.config)
        balancer = None
        if settings.gateway:
            self.llm_client = GatewayClient(self.config, settings)
        if settings.policy:
            balancer = self.llm_client._load_balancer
        actor_class = ray.remote(max_concurrency=_OPEN_GROUPS)(_CoordinatorActor)
        groups_per_step = self.config.data.train_batch_size
        self._coordinator = actor_class.remote(settings, groups_per_step, balancer)
        await self._coordinator.start.remote()
        self.llm_client = ScheduledClient(self.config, self.llm_client, self._coordinator)
        self.agent_loop_workers_class = ray.remote(_Worker)
        await super()._init_agent_loop_workers()

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Raises the error that ended the deliveries, if they have ended: a trainer that replaces
        failed groups would otherwise never stop."""
        ray.get(self._coordinator.check.remote())
        super().generate_sequences(prompts)


class ScheduledClient(LLMServerClient):
    """The client of a worker's loops: it asks their group, or in validation `validating`."""

    def __init__(self, config: Any, validating: LLMServerClient, coordinator: Any) -> None:
        super().__init__(config=config)
        self._validating = validating
        self._coordinator = coordinator

    def group(self, uid: str, sessions: int) -> SessionGroup:
        """A group that is about to run."""
        return SessionGroup(uid, sessions, lengths_of(self.config), self._make)

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def generate(
        self, request_id: str, *, prompt_ids: Any, sampling_params: Any, **others: Any
    ) -> TokenOutput:
        """The answer to one call of an agent loop, in the form of verl's
        `LLMServerClient.generate`. Raises what `SessionGroup.sample` raises."""
        session = _session.get()
        if session is None:
            return await self._validating.generate(
                request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **others
            )
        check_text(others)
        group, number = session
        sample = await group.sample(number, prompt_ids, sampling_params)
        return TokenOutput(**token_output(sample))

    async def _make(self, prompt: Prompt) -> list[Sample]:
        samples: list[Sample] = await self._coordinator.samples.remote(prompt)
        return samples


class _Worker(AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's worker; it also gives each loop its group."""

    def __init__(self, *given: Any, **named: Any) -> None:
        # Defined here because Ray copies inherited methods out of the class within an actor class,
        # and `super()` in such a copy refers to another class.
        super().__init__(*given, **named)

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: Any, trajectory: Any, trace: bool = False
    ) -> None:
        if not trajectory["validate"]:
            sessions = int(prompt.get("__rollout_n__", self.rollout_config.n))
            _group.set(self.llm_client.group(prompt["uid"], sessions))
        await super()._run_prompt(prompt, sampling_params, trajectory, trace)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **others: Any) -> None:
        for made in output if isinstance(output, list) else [output]:
            mask = made.extra_fields.pop(MASK, None)
            if mask is not None:
                made.response_mask = trained(made.response_mask, mask)
        await super()._agent_loop_postprocess(output, validate, **others)

    async def _run_agent_loop(
        self, sampling_params: Any, trajectory: Any, *, session_id: int, **others: Any
    ) -> None:
        group = _group.get()
        if group is not None:
            _session.set((group, session_id))
        await super()._run_agent_loop(sampling_params, trajectory, session_id=session_id, **others)


class _CoordinatorActor:
    """A `Coordinator` with its scheduler, or with a connection to a gateway or a deployment, in its
    own process. `balancer`: verl's load balancer, which knows its servers."""

    def __init__(self, settings: RoomSettings, groups_per_step: int, balancer: Any) -> None:
        self._settings = settings
        self._groups_per_step = groups_per_step
        self._balancer = balancer
        self._coordinator: Coordinator
        self._following: asyncio.Task[None]

    async def start(self) -> None:
        """Raises an error if the scheduler cannot be used, such as a gateway that is down."""
        settings = self._settings
        if settings.policy:
            rollouts = await self._schedule_here()
        else:
            rollouts = _elsewhere(settings)
            await rollouts.__aenter__()  # for as long as the actor lives
        transfer_queue.init()
        self._coordinator = Coordinator(rollouts, _tags, self._groups_per_step, settings.poll_s)

    async def samples(self, prompt: Prompt) -> list[Sample]:
        return await self._coordinator.samples(prompt)

    async def check(self) -> None:
        self._coordinator.check()

    async def _schedule_here(self) -> RolloutScheduler:
        rollouts = RolloutScheduler.from_toml(
            self._settings.policy, prompts_per_step=self._groups_per_step, version="auto"
        )
        await rollouts.__aenter__()
        servers = VerlServers(rollouts, self._balancer)
        await servers.follow()
        self._following = asyncio.create_task(servers.keep_following(self._settings.poll_s))
        return rollouts


def _elsewhere(settings: RoomSettings) -> RolloutScheduler:
    if settings.ray:
        return on_ray(name=settings.ray)
    return RolloutScheduler.connect(settings.gateway, key=settings.trainer_key)


async def _tags() -> Tags:
    """The tags of the training partition; empty before it exists."""
    partitions = await transfer_queue.async_kv_list(_PARTITION) or {}
    tags: Tags = partitions.get(_PARTITION, {})
    return tags
