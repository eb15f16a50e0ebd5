"""Tools by name: a coroutine cannot be stored, so who goes on with a run gives it again."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_sched.live.trajectory import Tool, Trajectory


class ToolGone(Exception):
    """A trajectory cannot go on: its tool went with an earlier process, and is not given again."""

    def __init__(self, name: str) -> None:
        if name:
            gone = f"its tool {name!r} was not given again"
            again = f", and give from_toml tools={{{name!r}: ...}} next time"
        else:
            gone, again = "its tool went with the process that had it", ""
        super().__init__(f"{gone}, in the middle of a trajectory: submit it again{again}")


class NamedTools:
    """The tools that outlive their process: those that are given under the same name to whoever
    goes on with its run."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = dict(tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def of(self, name: str) -> Tool:
        """The one of this name; where it is not given again, one that raises ToolGone."""

        async def gone(trajectory: Trajectory) -> None:
            raise ToolGone(name)

        return self._tools.get(name, gone)

    def name_of(self, tool: Tool | None) -> str | None:
        """ "" for one that has no name, None where there is none."""
        if tool is None:
            return None
        return next((name for name, other in self._tools.items() if other == tool), "")
