"""Tools by name: a coroutine cannot be stored, so a continued run must get its tools again."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_sched.live.trajectory import Tool, Trajectory


class ToolGone(Exception):
    """A trajectory cannot continue: its tool was lost with its process and not passed again."""

    def __init__(self, name: str) -> None:
        if name:
            gone = f"its tool {name!r} was not passed again"
            again = f", and pass from_toml tools={{{name!r}: ...}} next time"
        else:
            gone, again = "its tool was lost with its process", ""
        super().__init__(f"{gone}, in the middle of a trajectory: submit it again{again}")


class NamedTools:
    """The tools that outlive their process: the process that continues the run passes them under
    the same names."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = dict(tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def of(self, name: str) -> Tool:
        """The tool of this name; if it was not passed again, one that raises ToolGone."""

        async def gone(trajectory: Trajectory) -> None:
            raise ToolGone(name)

        return self._tools.get(name, gone)

    def name_of(self, tool: Tool | None) -> str | None:
        """The tool's name; "" without a name, None without a tool."""
        if tool is None:
            return None
        return next((name for name, other in self._tools.items() if other == tool), "")
