"""Tools by name: a coroutine cannot be stored, so who goes on with a run gives it again."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_sched.live.trajectory import Tool


class NamedTools:
    """The tools that outlive their process: those that are given under the same name to whoever
    goes on with its run."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = dict(tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def name_of(self, tool: Tool | None) -> str | None:
        """ "" for one that has no name, None where there is none."""
        if tool is None:
            return None
        return next((name for name, other in self._tools.items() if other == tool), "")
