"""How the facts of a run are named and encoded in its store."""

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
NAME = "name"

#: Of kinds of which there is one fact.
ONE = ""

_T = TypeVar("_T")

_ENCODER = msgspec.msgpack.Encoder()


class StoredPrompt(msgspec.Struct, frozen=True):
    """A prompt whose tokens are a piece of their own; `tool`: it had one, which is no data, and of
    which only the name is known, "" if it has none; `judged`: its samples are rewarded."""

    prompt: Prompt
    tool: bool
    tool_name: str = ""
    judged: bool = False


class StoredLoss(msgspec.Struct, frozen=True):
    """Why a group can never be whole; None: it was filtered. And the batch in which its trainer was
    told; None: not yet."""

    reason: str | None
    batch: int | None = None


class StoredWeights(msgspec.Struct, frozen=True):
    """The newest version that was published, and how it is loaded, as whoever loads it says it."""

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
    """The fact, and its tokens. `tool`: its name, "" for one without; None: it has none."""
    # One token stands for all of them: a prompt has to have some.
    short = msgspec.structs.replace(prompt, prompt_ids=prompt.prompt_ids[:1])
    fact = StoredPrompt(short, tool is not None, tool or "", judged)
    return encoded(fact), encode(Tokens(prompt.prompt_ids))


def prompt_owner(uid: str) -> str:
    return f"p:{uid}"


def delivery_name(action: Deliver) -> str:
    return f"{action.batch}.{action.part}"


def loss_name(uid: str, batch: int | None) -> str:
    """One that was submitted again may be lost again, while a batch still tells of before."""
    return f"{'' if batch is None else batch}:{uid}"


def lost_group(name: str) -> str:
    """The uid in a `loss_name`."""
    return name.partition(":")[2]
