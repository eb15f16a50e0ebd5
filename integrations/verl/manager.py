"""What verl's `agent_loop_manager_class` names: its agent loops behind our scheduler or gateway.

verl 0.9.1's trainers v1 (`trainer/ppo/v1`): loops run in AgentLoopWorkerTQ, which writes what they
make, and how far their groups are, to TransferQueue; that stays verl's. What changes is whom the
loops ask.
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
from rollout_sched.integrations.verl.coordinator import Coordinator
from rollout_sched.integrations.verl.gateway_client import (
    GatewayClient,
    check_text,
    lengths_of,
    room_settings,
)
from rollout_sched.integrations.verl.groups import MASK, SessionGroup, token_output, trained
from rollout_sched.integrations.verl.pacing import Tags
from rollout_sched.integrations.verl.settings import RoomSettings
from rollout_sched.integrations.verl.verl_servers import VerlServers
from rollout_sched.live.samples import Prompt, Sample

#: verl's training partition of TransferQueue.
_PARTITION = "train"

#: Calls that the coordinator may have open: one for each group that is not delivered yet. Those
#: beyond would wait behind them.
_OPEN_GROUPS = 100_000

#: The group that this task runs, or its agent loop is of, and of a loop its session; None in a
#: validation.
_group: ContextVar[SessionGroup | None] = ContextVar("_group", default=None)
_session: ContextVar[tuple[SessionGroup, int] | None] = ContextVar("_session", default=None)


class GatewayAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent loops, of any kind and any number of turns, with a gateway to generate.

    Each turn is a request of its own, in the session of its trajectory.
    """

    def __init__(self, config: Any, llm_client: Any, *others: Any, **named: Any) -> None:
        super().__init__(config, GatewayClient(config), *others, **named)


class ScheduledAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent loops of a single turn, whose prompts are groups of our scheduler's.

    Which groups run when, what a batch is made of and how stale a sample may be is the policy's to
    say: that of a gateway, of a deployment on verl's Ray cluster, or of a scheduler of verl's job
    before the servers that verl has started. Validation goes past the batches, to the gateway or
    to verl's own client.
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
        """Raises what has ended the deliveries, once nothing more will be delivered: a trainer that
        makes up for failed groups would go on without end."""
        ray.get(self._coordinator.check.remote())
        super().generate_sequences(prompts)


class ScheduledClient(LLMServerClient):
    """What the loops of a worker ask: in training their group, in a validation `validating`."""

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
        """As verl's. Raises what `SessionGroup.sample` raises."""
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
    """verl's, which tells its loops what group they are of."""

    def __init__(self, *given: Any, **named: Any) -> None:
        # Said anew, for Ray copies what is inherited from the class within an actor class, and a
        # copy's `super()` is that of another class.
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
    """A `Coordinator` and its scheduler, or the connection to a gateway's or a deployment's, in a
    process of their own. `balancer`: verl's, which knows its servers."""

    def __init__(self, settings: RoomSettings, groups_per_step: int, balancer: Any) -> None:
        self._settings = settings
        self._groups_per_step = groups_per_step
        self._balancer = balancer
        self._coordinator: Coordinator
        self._following: asyncio.Task[None]

    async def start(self) -> None:
        """Raises what speaks against scheduling so, such as a gateway that is not there."""
        settings = self._settings
        if settings.policy:
            rollouts = await self._schedule_here()
        else:
            rollouts = _elsewhere(settings)
            await rollouts.__aenter__()  # for as long as the actor lives
        transfer_queue.init()
        self._coordinator = Coordinator(rollouts, _tags, self._groups_per_step, settings.look_s)

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
        self._following = asyncio.create_task(servers.keep_following(self._settings.look_s))
        return rollouts


def _elsewhere(settings: RoomSettings) -> RolloutScheduler:
    if settings.ray:
        return RolloutScheduler.on_ray(name=settings.ray)
    return RolloutScheduler.connect(settings.gateway, key=settings.trainer_key)


async def _tags() -> Tags:
    """Of the training partition; empty before it is begun."""
    partitions = await transfer_queue.async_kv_list(_PARTITION) or {}
    tags: Tags = partitions.get(_PARTITION, {})
    return tags
