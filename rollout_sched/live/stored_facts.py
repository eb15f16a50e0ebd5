"""The names and the encoding of a run's facts in its store."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from rollout_sched.core.actions import Deliver
from rollout_sched.live.samples import Prompt
from rollout_sched.store.tokens import Tokens, encode

#: Kinds of facts.
RUN = "run"
GROUP = "group"
LENGTHS = "lengths"
RECENT = "recent"
PROMPT = "prompt"
DELIVERED = "delivered"
LEASE = "lease"
LOST = "failed"
TELLING = "telling"
REWARD = "reward"
WEIGHTS = "weights"
PAUSED = "paused"
MODEL = "model"
NAME = "name"

#: The name of the fact of kinds that have only one.
ONE = ""

_PROMPT_OWNER = "p:"

_T = TypeVar("_T")

_ENCODER = msgspec.msgpack.Encoder()


class StoredPrompt(msgspec.Struct, frozen=True):
    """A prompt, whose tokens are stored as a separate piece. `tool`: whether it had a tool, of
    which only the name is stored, "" without a name; `judged`: its samples get rewards."""

    prompt: Prompt
    tool: bool
    tool_name: str = ""
    judged: bool = False


class StoredLoss(msgspec.Struct, frozen=True):
    """`reason`: why a group can never be complete; None: it was filtered. `batch`: the batch that
    reported it to the trainer; None: not yet."""

    reason: str | None
    batch: int | None = None


class StoredWeights(msgspec.Struct, frozen=True):
    """The newest published version, and how to load it, as encoded by the code that loads it."""

    version: int
    loader: bytes


def encoded(fact: Any) -> bytes:
    return _ENCODER.encode(fact)


def decoded(data: bytes, kind: type[_T]) -> _T:
    """Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=kind)


def encoded_prompt(
    prompt: Prompt, *, tool: str | None, judged: bool = False
) -> tuple[bytes, bytes]:
    """The fact, and its tokens. `tool`: the tool's name, "" without a name; None: no tool."""
    # One token stands for all of them: a prompt must have at least one.
    short = msgspec.structs.replace(prompt, prompt_ids=prompt.prompt_ids[:1])
    fact = StoredPrompt(short, tool is not None, tool or "", judged)
    return encoded(fact), encode(Tokens(prompt.prompt_ids))


def prompt_owner(uid: str) -> str:
    return f"{_PROMPT_OWNER}{uid}"


def uid_of_owner(owner: str) -> str | None:
    """The uid in a `prompt_owner`; None for other owners of tokens."""
    return owner.removeprefix(_PROMPT_OWNER) if owner.startswith(_PROMPT_OWNER) else None


def delivery_name(action: Deliver) -> str:
    return f"{action.batch}.{action.part}"


def loss_name(uid: str, batch: int | None) -> str:
    """The name has the batch: a group that was submitted again may be lost again, while a batch
    still reports the earlier loss."""
    return f"{'' if batch is None else batch}:{uid}"


def lost_group(name: str) -> str:
    """The uid in a `loss_name`."""
    return name.partition(":")[2]
