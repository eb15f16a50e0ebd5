"""The engine behind the server: the simulated instance, its weights, and its failure."""

from __future__ import annotations

import math
import random
import time
from contextlib import suppress

import msgspec

from rollout_sched.live.ports import InstanceError, OnTokens, Order, Output, RequestRejected
from rollout_sched.simulators.fake_instance import synthetic_tokens as text
from rollout_sched.simulators.fake_instance.errors import Refusal
from rollout_sched.simulators.fake_instance.open_answers import OrderedResponse
from rollout_sched.simulators.fake_instance.realtime_instance import MODEL, RealtimeInstance
from rollout_sched.simulators.fake_instance.weights import FIRST_LABEL, EngineWeights, number_of
from rollout_sched.simulators.instance.sim_request import PauseMode
from rollout_sched.simulators.instance.spec import InstanceSpec

_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class EngineSettings(msgspec.Struct, frozen=True):
    """The settings of one simulated server.

    model              the served model's name
    speed              simulated seconds per second
    seed               of response lengths that are drawn
    update_s           time to load weights, in simulated seconds
    median_tokens      of those lengths, which are log-normal ...
    sigma              ... with this standard deviation of the logarithm
    stream_interval    tokens in a streamed chunk, if a request does not set it
    max_queued         with this many unanswered requests, more get a 503; 0: no limit
    versioned_text     other weights, identified by their label, give another text ...
    drift              ... in this share of the tokens
    world_size         workers, each a rank of weight transfers
    vocabulary         the token ids
    weight_version     the label of the initial weights
    """

    spec: InstanceSpec
    model: str = MODEL
    speed: float = 1.0
    seed: int = 0
    update_s: float = 0.0
    median_tokens: int = 256
    sigma: float = 0.8
    stream_interval: int = 1
    max_queued: int = 0
    versioned_text: bool = False
    drift: float = 1.0
    world_size: int = 1
    vocabulary: text.Vocabulary = text.LARGEST
    weight_version: str = FIRST_LABEL


class Engine:
    """One server's engine, across restarts. Make it in a running event loop.

    As in vLLM, a step with half loaded weights kills the engine, and only a restart helps.
    `unanswered` counts the requests in flight, `finished` those that ended, by reason. `adapters`
    are the paths of the loaded LoRA adapters, by name; `asleep` is the part of its memory that it
    has released.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._starts = 0
        self.unanswered = 0
        self.adapters: dict[str, str] = {}
        self._start(settings.weight_version)

    def _start(self, label: str) -> None:
        settings = self.settings
        self.instance = RealtimeInstance(
            settings.model,
            settings.spec,
            self._length,
            speed=settings.speed,
            version=number_of(label),
            versioned_text=settings.versioned_text,
            drift=settings.drift,
            vocabulary=settings.vocabulary,
        )
        load_s = settings.update_s / settings.speed
        self.weights = EngineWeights(self.instance, load_s, self._check_alive, label)
        self.dead = False
        self.asleep: set[str] = set()
        self._stuck = False
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}
        # Two starts within one clock tick must differ.
        self.started_at = time.time() + 1e-3 * self._starts
        self._starts += 1

    async def restart(self, label: str = "") -> None:
        """Restart empty, with the initial weights, or with others of this label."""
        await self.close()
        self.adapters.clear()
        self._start(label or self.settings.weight_version)

    async def close(self) -> None:
        self.weights.leave()
        await self.instance.close()

    # -- requests --------------------------------------------------------------------------

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        """Raises Refusal."""
        self._check_alive()
        if self.weights.half_loaded and not self.instance.paused:
            await self._die()
            self._check_alive()
        limit = self.settings.max_queued
        if limit and self.unanswered >= limit:
            raise Refusal(
                503, "The engine is currently busy and cannot accept new requests. Try again later."
            )
        self.unanswered += 1
        finished = self.finished
        try:
            output = await self.instance.generate(order, on_tokens)
        except RequestRejected as error:
            raise Refusal(400, str(error)) from None
        except InstanceError:
            raise Refusal(500, _DEAD) from None
        finally:
            self.unanswered -= 1
        if output.finish != "abort":  # vLLM does not count those
            finished[output.finish] += 1
        return output

    def _length(self, order: Order, response: OrderedResponse) -> int:
        """The requested length, no end, or a random one that is the same on any instance."""
        asked = (order.sampling.get("extra_args") or {}).get("fake_response_tokens")
        if isinstance(asked, int):
            return max(1, asked)
        if order.sampling.get("ignore_eos"):
            return self.settings.spec.max_model_len
        dice = random.Random(self.settings.seed << 32 ^ response.name)
        drawn = dice.lognormvariate(math.log(self.settings.median_tokens), self.settings.sigma)
        return max(1, round(drawn))

    def _check_alive(self) -> None:
        """Raises Refusal if the engine is dead."""
        if self.dead:
            raise Refusal(500, _DEAD)

    async def _die(self) -> None:
        """The engine dies; the process still answers."""
        self.dead = True
        await self.instance.close()

    # -- control ---------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        self._check_alive()
        try:
            await self.instance.pause(mode, clear_cache)
        except InstanceError:
            raise Refusal(500, _DEAD) from None

    async def get_stuck(self) -> None:
        """Generate no more tokens without reporting a failure; a dead engine still reports that it
        is dead."""
        self._stuck = True
        with suppress(InstanceError):
            await self.instance.pause("keep", False)

    @property
    def paused(self) -> bool:
        """Whether the engine reports that it is paused. Raises Refusal."""
        self._check_alive()
        return self.instance.paused and not self._stuck

    async def resume(self) -> None:
        self._check_alive()
        await self.instance.resume()
        if self.weights.half_loaded and self.unanswered:
            await self._die()
