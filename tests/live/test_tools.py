"""Tools by name."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.live.trainer.samples import NamedTools, ToolGone


async def search(trajectory):
    return None


async def other(trajectory):
    return None


def test_a_tool_is_known_by_the_name_under_which_it_is_given():
    tools = NamedTools({"search": search})
    assert tools.name_of(search) == "search"
    assert tools.name_of(other) == ""
    assert tools.name_of(None) is None
    assert "search" in tools
    assert "other" not in tools
    assert tools.of("search") is search


@pytest.mark.parametrize(
    ("name", "why"), [("", "lost with its process"), ("other", r"tools=\{'other': ...\} next time")]
)
def test_one_that_is_not_given_again_says_so(name, why):
    with pytest.raises(ToolGone, match=why):
        asyncio.run(NamedTools({"search": search}).of(name)(None))
