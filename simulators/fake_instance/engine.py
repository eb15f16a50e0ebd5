"""The engine behind the server: the simulated instance, its weights, its failure, and faults on
demand."""

from __future__ import annotations

import asyncio
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from rollout_sched.core.model.records import MAX_SIZE
from rollout_sched.flags import Flag
from rollout_sched.live.ports import InstanceError, OnTokens, Order, RequestRejected
from rollout_sched.simulators.fake_instance import fields
from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.answers import CountedOutput, OrderedResponse
from rollout_sched.simulators.fake_instance.instance import MODEL, RealtimeInstance
from rollout_sched.simulators.fake_instance.requests import Refusal
from rollout_sched.simulators.instance import InstanceSpec, PauseMode

# ------------------------------------------------------------------------------------------
# The rendezvous of the ranks of a weight-transfer group: as with NCCL, all wait for the last one.
#
# A group is identified by its master's address and port, across all simulated servers of this
# machine. A rank is a file locked by its owner, so a rank is free again when its process has ended.
# Rank 0 is the trainer's and not waited for, because the trainer here is often a test without NCCL.

#: Seconds between two checks of the ranks.
POLL_S = 0.02


class RankRange(msgspec.Struct, frozen=True):
    """The ranks `first` ... `first + count - 1` of one server, in a group of `world` ranks."""

    group: str
    first: int
    count: int
    world: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


class Rendezvous:
    """One server's membership in groups; in one at a time."""

    def __init__(self) -> None:
        self._locked: dict[Path, int] = {}  # rank's file -> its descriptor

    async def join(self, place: RankRange) -> None:
        """Wait until every rank is present: forever if one is missing, or if another server has one
        of ours."""
        self.leave()
        folder = _folder(place.group)
        for rank in place.ranks:
            path = folder / str(rank)
            while (descriptor := _lock(path)) is None:
                await asyncio.sleep(POLL_S)
            self._locked[path] = descriptor
        others = [folder / str(rank) for rank in range(1, place.world) if rank not in place.ranks]
        while not _all_locked(others):
            await asyncio.sleep(POLL_S)

    def leave(self) -> None:
        for path, descriptor in self._locked.items():
            path.unlink(missing_ok=True)
            os.close(descriptor)
        self._locked.clear()


def _folder(group: str) -> Path:
    """The group's folder, owned by this user."""
    digest = blake2b(group.encode(), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir(), f"rollout_sched_ranks_{os.getuid()}", digest)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _lock(path: Path) -> int | None:
    """The descriptor of the file with an exclusive lock; None if another process has it."""
    import fcntl  # not available on every platform

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except OSError:  # it is locked, or its owner deleted it
        pass
    os.close(descriptor)
    return None


def _all_locked(paths: Sequence[Path]) -> bool:
    return all(_is_locked(path) for path in paths)


def _is_locked(path: Path) -> bool:
    """Takes a shared lock for a moment, so a process that wants the exclusive lock must retry."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


# ------------------------------------------------------------------------------------------
# The weights of a simulated server: their label and their updates.

#: Number and label of the initial weights.
FIRST = -1
FIRST_LABEL = "default"


class EngineWeights:
    """The weights of one engine from its start to its end. Calls that change them raise Refusal.

    As in vLLM, the model is half loaded after a failed weight call, and during an update by
    transfer.

    load_s       seconds that loading takes, on the event loop's clock
    check_alive  raises Refusal if the engine is dead
    label        of the initial weights; `number_of` it is the instance's initial version

    `says` is the label that it reports when asked, which may be false; None if it reports no label.
    """

    def __init__(
        self,
        instance: RealtimeInstance,
        load_s: float,
        check_alive: Callable[[], None],
        label: str = FIRST_LABEL,
    ) -> None:
        self.label = label
        self.says: str | None = ""
        self._labels = {number_of(label): label}
        self._instance = instance
        self._load_s = load_s
        self._check_alive = check_alive
        self._torn = False
        self._transfer = False  # transfers are set up
        self._updating: Literal["", "model", "draft"] = ""  # by transfer
        self._drafter_fits = False  # it was loaded after the model
        self._group = Rendezvous()

    @property
    def half_loaded(self) -> bool:
        """Whether the next step kills the engine."""
        return self._torn or self._updating == "model"

    def label_of(self, version: int) -> str:
        return self._labels[version]

    async def set_label(self, label: str) -> None:
        """Tokens get this label from now on."""
        self._check_alive()
        number = number_of(label)
        self._labels[number] = self.label = label
        await self._instance.set_version(number)
        if self._drafter_fits:
            self._instance.clocked.update_drafter()

    def tear(self, reason: str) -> Refusal:
        """A weight call failed half way."""
        self._torn = True
        return Refusal(500, reason)

    @property
    def reported_label(self) -> str | None:
        """The label that it reports when asked; None if none."""
        return self.label if self.says == "" else self.says

    async def reload(self, path: object) -> None:
        """Load from disk. If there is nothing at `path`, the model is half loaded afterwards."""
        self._check_alive()
        if path is not None and not (isinstance(path, str) and Path(path).exists()):
            raise self.tear(f"no weights at {path!r}")
        await self._load()

    async def init_transfer(self, place: RankRange | None = None) -> None:
        """Set up transfers; with NCCL wait for all ranks of the group. `place`: our ranks."""
        self._check_alive()
        if place is not None:
            if place.ranks.stop > place.world:
                raise Refusal(500, f"rank {place.ranks[-1]} is not in a group of {place.world}")
            await self._group.join(place)
        self._check_alive()
        self._transfer = True

    def leave(self) -> None:
        """The process ends, and leaves its group."""
        self._group.leave()

    def start_update(self, of: Literal["model", "draft"] = "model") -> None:
        """Refused, without harm, if transfers are not set up or an update is in progress."""
        self._check_alive()
        if not self._transfer:
            raise Refusal(500, "Weight transfer not configured")
        if self._updating:
            raise Refusal(500, "Weight update already started")
        self._updating = of

    async def update(self) -> None:
        self._check_updating()
        await self._load()

    async def receive(self) -> None:
        """Receive all weights in one call. Refused if transfers are not set up."""
        self.start_update()
        await self.update()
        self._updating = ""

    async def finish_update(self, label: str | None) -> None:
        self._check_updating()
        if self._drafter_fits:
            self._instance.clocked.update_drafter()
        self._updating = ""
        if label is not None:
            await self.set_label(label)

    def _check_updating(self) -> None:
        self._check_alive()
        if not self._updating:
            raise Refusal(500, "Weight update not started")

    async def _load(self) -> None:
        await asyncio.sleep(self._load_s)
        self._check_alive()
        self._drafter_fits = self._updating == "draft"


def number_of(label: str) -> int:
    """The version number of a label; a label that is not a number gets one that no numeric label
    has."""
    if label == FIRST_LABEL:
        return FIRST
    if label.isdecimal():
        return int(label)
    return (1 << 60) + int.from_bytes(blake2b(label.encode(), digest_size=7).digest(), "little")


_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


Positive = Annotated[int, msgspec.Meta(ge=1)]


class EngineSettings(msgspec.Struct, frozen=True):
    """The settings of one simulated server.

    model              the served model's name
    speed              simulated seconds per second
    seed               of response lengths that are drawn, and of faults
    update_s           time to load weights, in simulated seconds
    median_tokens      median of these lengths, which are log-normal
    sigma              standard deviation of their logarithm
    stream_interval    tokens in a streamed chunk, if a request does not set it
    prompt_details     the usage of an answer has the cached tokens of its prompt
    max_queued         with this many unanswered requests, more get a 503; 0: no limit
    versioned_text     other weights, identified by their label, give another text
    world_size         workers, each a rank of weight transfers
    vocabulary         the token ids
    weight_version     the label of the initial weights
    as_vllm            the vLLM whose API it has; 0.23, vllm-ascend's, aborts nothing, has no label
                       and no versions in answers
    """

    spec: InstanceSpec
    model: str = MODEL
    speed: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    seed: int = 0
    update_s: float = 0.0
    median_tokens: Positive = 256
    sigma: float = 0.8
    stream_interval: Positive = 1
    prompt_details: Annotated[bool, Flag("--enable-prompt-tokens-details")] = False
    max_queued: Annotated[int, Flag("--max-num-queued-reqs")] = 0
    versioned_text: bool = False
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE), Flag("--tensor-parallel-size")] = 1
    vocabulary: text.Vocabulary = text.LARGEST
    weight_version: str = FIRST_LABEL
    as_vllm: Literal["0.32", "0.23"] = "0.32"


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

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> CountedOutput:
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
        rng = random.Random(self.settings.seed << 32 ^ response.name)
        drawn = rng.lognormvariate(math.log(self.settings.median_tokens), self.settings.sigma)
        least = fields.limits_of(order.sampling).min_tokens  # of this request
        return max(1, round(drawn), response.made_tokens + least)

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


# ------------------------------------------------------------------------------------------
# Faults on demand: errors that a server can simulate, each with a probability, set at run time.
#
# silent         accepts the request and never answers
# garbage        answers 200 with a body that is not JSON
# twice          answers, and then sends the answer once more
# another        answers under the id of another request
# unfinished     closes the connection just before the end of the answer: before a stream's [DONE],
#                or before the last bytes of a whole answer
# wrong_version  answers with another version than it has
# reset          closes the connection instead of answering
# cut            closes the connection in the middle of the answer
# slow           answers `seconds` later
# error_500, error_503   answers with that status
# update_500     fails a weight call, which leaves the model half loaded
# restart        restarts, empty, with its first weights; closes every connection

Kind = Literal[
    "silent",
    "garbage",
    "twice",
    "another",
    "unfinished",
    "wrong_version",
    "reset",
    "cut",
    "slow",
    "error_500",
    "error_503",
    "update_500",
    "restart",
]
Where = Literal["generate", "weights", "control", "all"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Fault(msgspec.Struct, forbid_unknown_fields=True):
    """One switch.

    on           the calls that it affects; "control" are the others except health and models
    probability  for each of those calls; 0 switches it off
    times        how often it may still occur; None: no limit
    seconds      of the loop's clock: how long "slow" waits and "restart" is away
    struck       how often it has occurred
    """

    fault: Kind
    on: Where | None = None
    probability: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    times: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    struck: int = 0

    @property
    def strikes(self) -> Where:
        return self.on or ("weights" if self.fault == "update_500" else "generate")


class Switchboard:
    """All switches of one server, one for each kind, and their random numbers."""

    def __init__(self, seed: int = 0) -> None:
        self.faults: dict[Kind, Fault] = {}
        self._rng = random.Random(seed)

    def set(self, fault: Fault) -> None:
        if fault.probability:
            self.faults[fault.fault] = fault
        else:
            self.faults.pop(fault.fault, None)

    def draw(self, where: Where) -> Fault | None:
        """The fault of this call, if any: the first kind that is drawn."""
        for fault in list(self.faults.values()):
            if fault.strikes in (where, "all") and self._rng.random() < fault.probability:
                fault.struck += 1
                if fault.times is not None:
                    fault.times -= 1
                    if not fault.times:
                        del self.faults[fault.fault]
                return fault
        return None


def parse_fault(text: str) -> Fault:
    """Parse KIND or KIND=PROBABILITY, as on the command line. Raises ValueError."""
    kind, _, probability = text.partition("=")
    try:
        return msgspec.convert({"fault": kind, "probability": float(probability or 1)}, Fault)
    except ValueError:
        raise ValueError(
            f"{text!r} is not KIND=PROBABILITY with a probability from 0 to 1 and one of the "
            f"kinds {', '.join(KINDS)}"
        ) from None
