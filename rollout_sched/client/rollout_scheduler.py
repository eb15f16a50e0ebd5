"""RolloutScheduler: the trainer's interface, whether it schedules in process or remotely."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from rollout_sched.config import load_policy
from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.integrations.vllm.weight_updates import Apply
from rollout_sched.live import LiveScheduler, RunOptions, Settings
from rollout_sched.live.ports import InstanceClient
from rollout_sched.live.requests import Tool
from rollout_sched.live.trainer import TRAINER, Borrower, KeepFunc, LeaseEnded, RewardFunc
from rollout_sched.live.trainer.samples import Batch, Mismatch, Prompt

if TYPE_CHECKING:
    from rollout_sched.client.blocking import BlockingRollouts

log = logging.getLogger(__name__)

_DEFAULTS = RunOptions()

#: What has been received: a batch number, and the number of its last received part.
Position = tuple[int | None, int | None]

NOTHING: Position = (None, None)


class RolloutScheduler(ABC):
    """Takes prompts and returns batches; use it in an `async with` block."""

    #: What has been received; sent with the request for the next batch.
    _received: Position

    @staticmethod
    def from_toml(
        policy: str | Path,
        instances: Sequence[str | InstanceClient] = (),
        *,
        allow_code: bool = False,
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
        allow_code        the file may name classes and functions of your own: they are imported
        instances         URLs of vLLM servers, or clients such as InProcessInstance; those that
                          are not up yet join later
        prompts_per_step  groups in a batch
        version           the trainer's current version; "auto": the version that the instances
                          report
        stream_every      tokens between partial results, which survive the death of an instance;
                          0: no streaming, which is faster
        journal           a new file that records every event
        store             a folder that keeps the run across restarts of this process; an existing
                          run in it is continued, otherwise a new one begins
        length_history    a file with the response lengths of prompts, kept from run to run
        settings          of the driver; None: from the policy's [live] table
        borrower          the trainer, if it shares the instances' GPUs: it starts on the instances
                          that are lent to it ([lending]), with the parts that it already has
        reward            computes the reward of a finished sample: a plain or coroutine function
                          of the Sample that returns a number, or numbers by name; None: that of the
                          policy's [rewards] table. The limits in that table apply to both
        keep              decides whether to train a group: a function of its samples, which have
                          their rewards, or the name of a shipped one; None: as for `reward`
        trainer           the name under which batches are leased; keep it after a restart
        tools             tools of trajectories that continue from a store, by name; a restarted
                          process must pass them under the same names

        Raises ConfigError.
        """
        loaded = load_policy(str(policy), allow_code=allow_code)
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
        """Use the gateway at `url`. Without a key it must be on this machine. A trainer's key is
        enough for everything except adding and removing instances, which needs an administrator's.

        The URL of an --admin-socket is unix:///path/of/the/socket. `trainer`: each trainer that
        takes its own batches has its own name, and keeps it after a restart.
        """
        from rollout_sched.client.remote import Remote, TrainerClient  # inherits from this class

        return Remote(partial(TrainerClient, url, key), trainer)

    def blocking(self) -> BlockingRollouts:
        """This interface without coroutines, for a trainer without an event loop; use it in a
        `with` block."""
        from rollout_sched.client.blocking import BlockingRollouts  # it calls this class's methods

        return BlockingRollouts(self)

    async def submit(self, prompts: Iterable[Prompt], *, tool: Tool | None = None) -> list[str]:
        """Queue groups. Raises CallerError at the first invalid group; those before it stay queued.

        Token ids may be lists or integer arrays (numpy, torch).

        Submitting a group again with the same prompt has no effect. Returns the uids of those whose
        batch was acknowledged before: they will not be delivered again.

        With a `tool`, a coroutine function, each sample is a trajectory of several turns: after
        each turn the tool is called with the `Trajectory` and returns the token ids that follow, or
        None to end it. `max_tokens` limits the tokens generated in all turns together. Only
        `from_toml` accepts a tool: a coroutine cannot be sent to another process.
        """
        delivered = await self._submit(checked(prompts), tool)
        if delivered:
            log.warning(
                "%d submitted groups are already acknowledged and not generated again: %r, ...",
                len(delivered),
                delivered[0],
            )
        return delivered

    @abstractmethod
    async def _submit(self, prompts: Iterable[Prompt], tool: Tool | None) -> list[str]:
        """Submit prompts that have been checked."""

    @abstractmethod
    async def close_submissions(self) -> None:
        """No more prompts will come: the last batches may be short, and `batches` ends."""

    async def next_batch(self, *, parts: bool = False) -> Batch | None:
        """Wait for the next batch; None when submissions are closed and nothing is left.

        With `parts`, returns the groups that are complete so far, if the policy delivers in parts
        (`part_prompts`); call it again until a part is the `last`. Without `parts`, returns all of
        the batch that was not yet received in parts. If the wait needs something from the caller or
        an operator, a log message says what.

        This call acknowledges the last batch or part received: it counts as trained. Raises
        LeaseEnded if that batch has gone to another trainer because this one was not heard of for
        too long: discard what was trained on it. The next call returns a batch leased to this
        trainer.
        """
        async with self._waiting_for_batch():
            return await self._next_batch(parts)

    @abstractmethod
    async def _next_batch(self, parts: bool) -> Batch | None: ...

    def acknowledge(self, batch: int) -> None:
        """Continue from a checkpoint that was trained up to this batch number: the next request
        returns what follows it, if the scheduler has kept that."""
        self._received = batch, None

    async def publish_weights(self, version: int, apply: Apply, *, wait: bool = False) -> None:
        """Announce that `version` is ready. With `wait`, wait until all joined instances, and at
        least one, have loaded it.

        Raises CallerError if the version does not grow, or a checkpoint does not exist. Publishing
        the newest version again in the same way has no effect.
        """
        async with log_while_waiting(f"version {version}", partial(self._awaited, "weights")):
            await self._publish_weights(version, apply, wait)

    @abstractmethod
    async def _publish_weights(self, version: int, apply: Apply, wait: bool) -> None: ...

    @abstractmethod
    async def report_mismatch(self, mismatch: Mismatch) -> None:
        """Report how the trainer's log-probs differ from those of a batch, as
        `integrations.torch.mismatch` finds it: it is in `state()` and in the gateway's metrics, and
        the log says when it is large."""

    @abstractmethod
    async def return_instance(self, url: str) -> None:
        """Return an instance that was lent to the trainer (see `borrower`). Call it before you
        publish the weights, so that all instances get them together. Raises CallerError if the
        instance is not lent, or was lost since. Only `from_toml` supports it."""

    @abstractmethod
    async def add_instance(self, instance: str | InstanceClient) -> None:
        """Add a vLLM server that is up. Raises CallerError if it was already added, InstanceError
        or GatewayError if it does not answer."""

    @abstractmethod
    async def remove_instance(self, url: str, *, drain: bool = False) -> None:
        """Remove an instance. Its requests continue on others; with `drain` they finish first.

        Over HTTP the drain continues after this call returns.
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
        """Logs why the wait takes long; when the lease has ended, nothing counts as received."""
        try:
            async with log_while_waiting("a batch", partial(self._awaited, "batch")):
                yield
        except LeaseEnded:
            self._received = NOTHING
            raise

    async def batches(self) -> AsyncIterator[Batch]:
        """Batches until submissions are closed and nothing is left. You may stop iterating and call
        `batches` again later."""
        while (batch := await self.next_batch()) is not None:
            yield batch

    async def parts(self) -> AsyncIterator[Batch]:
        """The batches in parts, as their groups complete: accumulate gradients over the parts and
        do the optimiser step at the `last` one. Do not publish weights before that."""
        while (part := await self.next_batch(parts=True)) is not None:
            yield part


# ------------------------------------------------------------------------------------------
# Checks a trainer's prompts before they are submitted.
#
# A struct accepts any values. Without this check, a wrong value would fail far from here: at an
# instance that refuses it, or when it is serialised.

#: Fields not checked here: `extra` is returned unchanged, sampling may hold vLLM objects.
_OPAQUE: dict[str, Any] = {"sampling": {}, "each": [], "extra": {}}


def checked(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """The prompts with plain integers and lists. Raises CallerError at the first invalid prompt,
    with the group, the field and the error."""
    if isinstance(prompts, Prompt) or not isinstance(prompts, Iterable):
        raise CallerError(f"submit takes a list of Prompts, not a {type(prompts).__name__}")
    return map(_checked, prompts)


def _checked(prompt: Prompt) -> Prompt:
    if not isinstance(prompt, Prompt):
        raise CallerError(f"submit takes Prompts, not a {type(prompt).__name__}")
    ids: Any = prompt.prompt_ids
    if isinstance(ids, str):
        raise CallerError(
            f"group {prompt.uid!r}: prompt_ids are token ids, such as tokenizer.encode(text), "
            f"not text"
        )
    shape = msgspec.structs.replace(prompt, **_OPAQUE)
    try:
        plain = msgspec.convert(msgspec.to_builtins(shape, enc_hook=_listed), Prompt)
        return msgspec.structs.replace(
            plain,
            sampling=_sampling(prompt.sampling),
            each=[_sampling(sampling) for sampling in prompt.each],
            extra=prompt.extra,
        )
    except (msgspec.ValidationError, TypeError) as error:
        raise CallerError(f"group {prompt.uid!r}: {error}") from error


def _listed(value: Any) -> Any:
    """A numpy or torch array or number as a Python list or number."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"got a {type(value).__name__}, expected a number, a string or a list")


def _sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(sampling, dict):
        raise TypeError(f"sampling must be a dict, not a {type(sampling).__name__}")
    return {
        name: _listed(value) if hasattr(value, "tolist") else value
        for name, value in sampling.items()
    }


# ------------------------------------------------------------------------------------------
# Logs why a wait takes long.

#: Seconds until the reason is first checked and logged, and between two checks.
POLL_S = 5.0


@contextlib.asynccontextmanager
async def log_while_waiting(what: str, why: Callable[[], Awaitable[str]]) -> AsyncIterator[None]:
    """While the block waits for `what`, log the reason that `why` returns whenever it changes; ""
    is not logged."""
    saying = asyncio.create_task(_say(what, why))
    try:
        yield
    finally:
        saying.cancel()


async def _say(what: str, why: Callable[[], Awaitable[str]]) -> None:
    said = ""
    while True:
        await asyncio.sleep(POLL_S)
        try:
            reason = await why()
        except RolloutError as error:
            reason = str(error)
        if reason and reason != said:
            log.warning("still waiting for %s: %s", what, reason)
        said = reason
