"""Tools by name."""

from __future__ import annotations

from rollout_sched.live.tools import NamedTools


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
    assert tools.get("search") is search
    assert tools.get("") is None
