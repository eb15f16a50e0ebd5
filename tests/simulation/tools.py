"""Tools of trajectories: their prompts contain the number of turns and the outcome of each call."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import msgspec

from rollout_sched.live.requests.trajectories import Tool, Trajectory
from rollout_sched.live.trainer.samples import Prompt

#: Most tokens that a tool returns.
LONGEST = 12


class ToolBroken(Exception):
    """Raised on purpose."""


class Tools(msgspec.Struct, frozen=True):
    """The tools of one run.

    share    share of the prompts that have a tool
    named    share of those whose tool is available again after a restart
    turns    most turns
    seconds  longest duration of a call
    broken   share of the groups whose tool raises
    """

    share: float
    named: float
    turns: int
    seconds: float
    broken: float


def draw(rng: Random) -> Tools:
    return Tools(
        share=rng.choice([0.3, 1.0]),
        named=rng.choice([0.5, 1.0, 1.0]),
        turns=rng.choice([2, 4]),
        seconds=rng.choice([0.0, 0.3, 3.0]),
        broken=rng.choice([0.0, 0.0, 0.2]),
    )


def said_by_prompt(tools: Tools, rng: Random) -> dict[str, Any]:
    """The `extra` of a prompt."""
    if rng.random() >= tools.share:
        return {}
    turns = rng.randint(1, tools.turns)
    return {
        "tool": "named" if rng.random() < tools.named else "unnamed",
        "turns": turns,
        "tool_s": round(rng.uniform(0, tools.seconds), 3),
        "raises_at": rng.randint(1, turns) if rng.random() < tools.broken else 0,
    }


async def named(trajectory: Trajectory) -> list[int] | None:
    extra, turn = trajectory.extra, trajectory.turn
    await asyncio.sleep(extra["tool_s"])
    if turn == extra["raises_at"]:
        raise ToolBroken("as its prompt says")
    return None if turn == extra["turns"] else observation(trajectory.uid, turn)


async def unnamed(trajectory: Trajectory) -> list[int] | None:
    return await named(trajectory)


#: The tools that are available again after a restart.
NAMED: dict[str, Tool] = {"named": named}

_TOOLS: dict[str, Tool] = {"named": named, "unnamed": unnamed}


def of(prompt: Prompt) -> Tool | None:
    return _TOOLS.get(prompt.extra.get("tool", ""))


def observation(uid: str, turn: int) -> list[int]:
    """The tokens after a turn: ids that no response contains."""
    rng = Random(f"observation/{uid}/{turn}")
    return [rng.randrange(1000) for _ in range(rng.randint(1, LONGEST))]
