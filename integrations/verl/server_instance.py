"""One of verl's own LLM servers, a Ray actor, as an instance of the live driver.

verl 0.9.1, `workers/rollout/vllm_rollout/vllm_async_server.py`. verl updates its weights: the
checkpoint engine aborts all requests, loads the weights, and resumes (`abort_all_requests`,
`set_global_steps`, `resume_generation`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from rollout_sched.client import RolloutScheduler
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.verl.generate_call import ABORTED
from rollout_sched.live.ports import (
    Description,
    Gauges,
    InstanceError,
    InstanceGone,
    OnTokens,
    Order,
    Output,
    RequestRejected,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

#: When this module was first imported in the server's process: another time means that the process
#: was restarted.
_BEGAN = time.time()


class ServerFacts(msgspec.Struct, frozen=True):
    """What a server reports about itself; `version` and `paused` are None if it does not know."""

    slots: int
    kv_tokens: int
    max_model_len: int
    version: int | None
    paused: bool | None
    began: float


def facts_of(server: Any) -> ServerFacts:
    """Runs in the actor, with verl's server. The server has no API for these facts, so they are
    read from the same attributes that its own methods use."""
    engine = server.engine.vllm_config
    return ServerFacts(
        slots=engine.scheduler_config.max_num_seqs * engine.parallel_config.data_parallel_size,
        kv_tokens=engine.cache_config.num_gpu_blocks * engine.cache_config.block_size,
        max_model_len=engine.model_config.max_model_len,
        version=server.global_steps,
        paused=getattr(server, "_submission_paused", None),
        began=_BEGAN,
    )


class ServerInstance:
    """`live.ports.InstanceClient` for the handle of a server.

    verl pauses the server for its weight updates, so our pause only aborts our own requests on it.
    The progress of requests is not visible: the gauges count the requests that we wait for, and Ray
    reports if the server has died.
    """

    def __init__(self, address: str, handle: Any) -> None:
        self.name = address
        self._handle = handle
        self._open: set[str] = set()
        self._generated = 0

    async def describe(self) -> Description:
        """Raises InstanceError, as every call to the server."""
        facts = await self._facts()
        return Description(
            slots=facts.slots,
            kv_tokens=facts.kv_tokens,
            max_model_len=facts.max_model_len,
            version=facts.version,
            started_at=facts.began,
            paused=facts.paused,
            capabilities=frozenset(
                {"generate", "abort", "pause", "weight_info", "weight_versions"}
            ),
        )

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        """Returns no partial results, whatever `stream_every` says. Raises InstanceError, or
        RequestRejected if verl's server refuses the request."""
        sampling = dict(order.sampling)
        logprobs = sampling.pop("logprobs", None) is not None
        sampling.update(logprobs=logprobs, max_tokens=order.max_new_tokens)
        self._open.add(order.id)
        try:
            made = await self._answer(
                self._handle.generate.remote(
                    request_id=order.id,
                    prompt_ids=list(order.token_ids),
                    sampling_params=sampling,
                )
            )
        finally:
            self._open.discard(order.id)
        self._generated += len(made.token_ids)
        return _output(made, order)

    async def detokenize(self, token_ids: Sequence[int]) -> str | None:
        """None: verl's server is not asked for text."""
        return None

    async def abort(self, order_id: str) -> None:
        # With the default, the server would drop its whole prefix cache.
        await self._answer(self._handle.abort_request.remote(order_id, reset_prefix_cache=False))

    async def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        if mode == "abort":
            await asyncio.gather(*map(self.abort, self._open))

    async def resume(self) -> None:
        """Does nothing: `pause` does not stop the server."""

    async def set_version(self, version: int) -> None:
        """Does nothing: verl sets the version itself."""

    async def weight_version(self) -> int | None:
        return (await self._facts()).version

    async def is_paused(self) -> bool | None:
        return (await self._facts()).paused

    async def gauges(self) -> Gauges:
        facts = await self._facts()
        waiting = len(self._open)  # none counts as running, because its progress is not visible
        return Gauges(0, waiting, 0.0, generated_tokens=self._generated, started_at=facts.began)

    async def close(self) -> None:
        """Does nothing: the server belongs to verl."""

    async def _facts(self) -> ServerFacts:
        facts: ServerFacts = await self._answer(self._handle.__ray_call__.remote(facts_of))
        return facts

    async def _answer(self, answer: Awaitable[T]) -> T:
        from ray.exceptions import RayActorError

        try:
            return await answer
        except ValueError as error:  # verl raises it for an invalid prompt or parameters
            unquoted = f"{self.name} refused it"
            raise RequestRejected(f"{self.name}: {error}", unquoted=unquoted) from error
        except RayActorError as error:
            raise InstanceGone(f"{self.name}: {error}") from error
        except Exception as error:  # any error of the engine
            unquoted = f"{self.name}: {type(error).__name__}"
            raise InstanceError(f"{unquoted}: {error}", unquoted=unquoted) from error


def _output(made: Any, order: Order) -> Output:
    """Converts verl's TokenOutput. verl aborts requests before the weights change, so an answer has
    one version."""
    tokens = len(made.token_ids)
    if made.stop_reason == ABORTED:
        finish: Literal["stop", "length", "abort"] = "abort"
    else:
        finish = "length" if tokens >= order.max_new_tokens else "stop"
    version = made.extra_fields.get("global_steps")
    spans = () if version is None or not tokens else ((version, tokens),)
    return Output(list(made.token_ids), made.log_probs, finish, spans)


# ------------------------------------------------------------------------------------------
# Adds and removes instances of a scheduler as the servers of verl's load balancer change.


def servers_of(balancer: Any) -> dict[str, Any]:
    """Address -> handle. Runs in the actor, with verl's load balancer: its API returns only the
    addresses of its servers."""
    servers = getattr(balancer, "_servers", None)
    if servers is None:
        raise CallerError(
            f"{type(balancer).__name__} does not keep its servers where verl's own load balancer "
            "does; remove rollout.router_config_path, or put a gateway before the servers"
        )
    return dict(servers)


class VerlServers:
    """Keeps the instances of `rollouts` equal to the load balancer's servers: verl removes hybrid
    servers while it trains on their GPUs."""

    def __init__(self, rollouts: RolloutScheduler, balancer: Any) -> None:
        self._rollouts = rollouts
        self._balancer = balancer
        self._here: set[str] = set()

    async def follow(self) -> None:
        """Add the new servers and remove the missing ones. Raises CallerError or InstanceError; the
        changes made before the error stay."""
        servers = await self._balancer.__ray_call__.remote(servers_of)
        for address in self._here - set(servers):
            self._here.discard(address)
            await self._rollouts.remove_instance(address)
        for address in set(servers) - self._here:
            await self._rollouts.add_instance(ServerInstance(address, servers[address]))
            self._here.add(address)

    async def keep_following(self, poll_s: float) -> None:
        """Call `follow` every `poll_s` seconds, until this is cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            try:
                await self.follow()
            except Exception as error:  # it may succeed next time
                log.warning("cannot update verl's servers: %s", error)
