"""What stands behind the server: the simulated instance, the label of its weights, and its end."""

from __future__ import annotations

import asyncio
import math
import random
import time
from hashlib import blake2b
from pathlib import Path

import msgspec

from rollout_sched.live.ports import InstanceError, OnTokens, Order, Output, RequestRejected
from rollout_sched.simulators.fake_instance.errors import Refusal
from rollout_sched.simulators.fake_instance.open_answers import Response
from rollout_sched.simulators.fake_instance.realtime_instance import RealtimeInstance
from rollout_sched.simulators.instance.sim_request import PauseMode
from rollout_sched.simulators.instance.spec import InstanceSpec

_UNLABELLED = -1
_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class EngineSettings(msgspec.Struct, frozen=True):
    """How one simulated server is started.

    model              the served model's name
    speed              simulated seconds in a second
    seed               of the response lengths that nobody asked for
    update_s           for loading weights, in simulated seconds
    median_tokens      of those lengths, which are log-normal ...
    sigma              ... with this standard deviation of the logarithm
    max_queued         unanswered requests from which on more get a 503; 0: no limit
    versioned_text     other weights make another text, told apart by their label
    """

    spec: InstanceSpec
    model: str = "simulated"
    speed: float = 1.0
    seed: int = 0
    update_s: float = 0.0
    median_tokens: int = 256
    sigma: float = 0.8
    max_queued: int = 0
    versioned_text: bool = False


class Engine:
    """One server's engine from start to restart to restart. Make it in a running event loop.

    As in vLLM, a weight call that fails leaves the model half torn down: the next step is the end,
    and then only a restart helps.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._starts = 0
        self._unanswered = 0
        self._start()

    def _start(self) -> None:
        settings = self.settings
        self.instance = RealtimeInstance(
            settings.model,
            settings.spec,
            self._length,
            speed=settings.speed,
            version=_UNLABELLED,
            versioned_text=settings.versioned_text,
        )
        self._labels = {_UNLABELLED: "default"}
        self._torn = False
        self._session = False
        self._transfer = False
        self.label = "default"
        self.dead = False
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}
        # Two starts within one clock tick are still two starts.
        self.started_at = time.time() + 1e-3 * self._starts
        self._starts += 1

    async def restart(self) -> None:
        """Come back empty, with the weights it was first started with."""
        await self.instance.close()
        self._start()

    @property
    def unanswered(self) -> int:
        return self._unanswered

    def label_of(self, version: int) -> str:
        return self._labels[version]

    # -- requests --------------------------------------------------------------------------

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        """Raises Refusal."""
        self._check_alive()
        if self._half_loaded and not self.instance.paused:
            await self._die()
            self._check_alive()
        limit = self.settings.max_queued
        if limit and self._unanswered >= limit:
            raise Refusal(
                503, "The engine is currently busy and cannot accept new requests. Try again later."
            )
        self._unanswered += 1
        finished = self.finished
        try:
            output = await self.instance.generate(order, on_tokens)
        except RequestRejected as error:
            raise Refusal(400, str(error)) from None
        except InstanceError:
            raise Refusal(500, _DEAD) from None
        finally:
            self._unanswered -= 1
        if output.finish != "abort":  # vLLM does not count those
            finished[output.finish] += 1
        return output

    def _length(self, order: Order, response: Response) -> int:
        """As asked for, or without end, or drawn: the same for one response on any instance."""
        asked = (order.sampling.get("extra_args") or {}).get("fake_response_tokens")
        if isinstance(asked, int):
            return max(1, asked)
        if order.sampling.get("ignore_eos"):
            return self.settings.spec.max_model_len
        dice = random.Random(self.settings.seed << 32 ^ response.name)
        drawn = dice.lognormvariate(math.log(self.settings.median_tokens), self.settings.sigma)
        return max(1, round(drawn))

    @property
    def _half_loaded(self) -> bool:
        return self._torn or self._session

    def _check_alive(self) -> None:
        if self.dead:
            raise Refusal(500, _DEAD)

    async def _die(self) -> None:
        """The process is still there to say so."""
        self.dead = True
        await self.instance.close()

    # -- control ---------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        self._check_alive()
        try:
            await self.instance.pause(mode, clear_cache)
        except InstanceError:
            raise Refusal(500, _DEAD) from None

    async def resume(self) -> None:
        self._check_alive()
        await self.instance.resume()
        if self._half_loaded and self._unanswered:
            await self._die()

    async def set_label(self, label: str) -> None:
        """Tokens to come carry this label."""
        self._check_alive()
        number = int(label) if label.isdecimal() else _spread(label)
        self._labels[number] = self.label = label
        await self.instance.set_version(number)

    # -- weights ---------------------------------------------------------------------------

    async def reload_weights(self, path: object) -> None:
        """From disk. Raises Refusal if there is nothing, and then the model is torn."""
        self._check_alive()
        if path is not None and not (isinstance(path, str) and Path(path).exists()):
            raise self.tear(f"no weights at {path!r}")
        await self._load()

    def tear(self, reason: str) -> Refusal:
        """A weight call failed half way."""
        self._torn = True
        return Refusal(500, reason)

    def begin_transfer(self) -> None:
        self._check_alive()
        self._transfer = True

    def begin_session(self) -> None:
        """Raises Refusal, which does no harm, if transfers are not set up or one is under way."""
        self._check_alive()
        if not self._transfer:
            raise Refusal(500, "Weight transfer not configured")
        if self._session:
            raise Refusal(500, "Weight update already started")
        self._session = True

    async def receive_weights(self) -> None:
        self._check_alive()
        if not self._session:
            raise Refusal(500, "Weight update not started")
        await self._load()

    async def end_session(self, label: str | None) -> None:
        self._check_alive()
        if not self._session:
            raise Refusal(500, "Weight update not started")
        self._session = False
        if label is not None:
            await self.set_label(label)

    async def _load(self) -> None:
        await asyncio.sleep(self.settings.update_s / self.settings.speed)
        self._check_alive()


def _spread(label: str) -> int:
    """A number for a label that is none, out of the way of those that are."""
    return (1 << 60) + int.from_bytes(blake2b(label.encode(), digest_size=7).digest(), "little")
