"""What speaks against an instance's joining, and what is done so that nothing does."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from rollout_sched.live.admission import settle_pause, with_the_fleets_model
from rollout_sched.live.pause import Pause, PausedBy
from rollout_sched.live.ports import Description, InstanceError
from rollout_sched.live.settings import Settings
from tests.live.scripted import Scripted

PLAIN = Description(8, 1000, 1000)
PAUSABLE = msgspec.structs.replace(PLAIN, capabilities=frozenset({"pause"}))

NOBODY, US, ADMINISTRATOR, BOTH, SOMEBODY_ELSE = PausedBy
RESUME, HOLD = "resume", ("pause", "keep", False)


@pytest.mark.parametrize(
    ("by", "found_paused", "asked", "after"),
    [
        (NOBODY, False, [], NOBODY),
        (NOBODY, True, "refused", SOMEBODY_ELSE),
        (NOBODY, None, [RESUME], NOBODY),
        (US, False, [], NOBODY),
        (US, True, [RESUME], NOBODY),
        (US, None, [RESUME], NOBODY),
        (ADMINISTRATOR, False, [HOLD], ADMINISTRATOR),
        (ADMINISTRATOR, True, [], ADMINISTRATOR),
        (ADMINISTRATOR, None, [HOLD], ADMINISTRATOR),
        (BOTH, False, [HOLD], ADMINISTRATOR),
        (BOTH, True, [], ADMINISTRATOR),
        (SOMEBODY_ELSE, False, [], NOBODY),
        (SOMEBODY_ELSE, True, "refused", SOMEBODY_ELSE),
    ],
)
def test_it_joins_paused_if_it_is_held_and_else_not(
    by: PausedBy, found_paused: bool | None, asked: Any, after: PausedBy
) -> None:
    client, pause = Scripted(), Pause("i0")
    pause.by = by
    description = msgspec.structs.replace(PAUSABLE, paused=found_paused)
    settling = settle_pause(client, description, pause, Settings())
    if asked == "refused":
        with pytest.raises(InstanceError, match=r"not by us.*POST i0/resume.*resume_paused"):
            asyncio.run(settling)
        assert client.calls == []
    else:
        asyncio.run(settling)
        assert client.calls == asked
    assert pause.by is after


def test_what_is_found_paused_is_resumed_where_we_are_told_to() -> None:
    client, pause = Scripted(), Pause("i0")
    description = msgspec.structs.replace(PAUSABLE, paused=True)
    asyncio.run(settle_pause(client, description, pause, Settings(resume_paused=True)))
    assert (client.calls, pause.by) == ([RESUME], NOBODY)


@pytest.mark.parametrize("by", PausedBy)
def test_one_that_cannot_be_paused_joins_unless_it_is_held(by: PausedBy) -> None:
    client, pause = Scripted(), Pause("i0")
    pause.by = by
    settling = settle_pause(client, PLAIN, pause, Settings())
    if by in (ADMINISTRATOR, BOTH):
        with pytest.raises(InstanceError, match=r"held.*release it.*VLLM_SERVER_DEV_MODE"):
            asyncio.run(settling)
    else:
        asyncio.run(settling)
        assert pause.by is NOBODY
    assert client.calls == []


@pytest.mark.parametrize(
    ("model", "others", "known_as"),
    [
        ("llama", [], "llama"),
        ("llama", ["llama", "llama"], "llama"),
        ("llama", ["", "llama"], "llama"),
        ("", ["llama"], ""),  # it does not say
        ("llama", ["", ""], "llama"),
    ],
)
def test_one_of_the_fleets_model(model: str, others: list[str], known_as: str) -> None:
    here = [msgspec.structs.replace(PLAIN, model=other) for other in others]
    description = msgspec.structs.replace(PLAIN, model=model)
    assert with_the_fleets_model(Scripted(), description, here).model == known_as


def test_one_of_another_model_is_refused_with_both_names() -> None:
    here = [msgspec.structs.replace(PLAIN, model="llama")]
    description = msgspec.structs.replace(PLAIN, model="qwen", models=("qwen", "tuned"))
    with pytest.raises(InstanceError, match=r"serves qwen, tuned where .* serve llama"):
        with_the_fleets_model(Scripted(), description, here)


def test_one_of_several_models_is_asked_for_the_fleets() -> None:
    class Several(Scripted):
        used = ""

        def use_model(self, model: str) -> None:
            self.used = model

    client = Several()
    here = [msgspec.structs.replace(PLAIN, model="tuned")]
    description = msgspec.structs.replace(PLAIN, model="base", models=("base", "tuned"))
    assert with_the_fleets_model(client, description, here).model == "tuned"
    assert client.used == "tuned"
