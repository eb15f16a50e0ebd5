"""Tool calls on demand: which one a chat is answered with, and how its messages word it.

A request that has `tools` is answered with a call of one where its last user message says so, as in
`call add {"a": 1, "b": 2}`. A message that says several gets one after the other, each when the one
before it was answered. Where `tool_choice` demands a call that no message says, it is one of the
tool that it names, or of the first, without arguments; "none" is answered with text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

_SAID = re.compile(r"\bcall (\w+) (\{[^{}]*\})")


class Function(msgspec.Struct):
    """Of a call; `arguments` is a JSON object as text. A tool that is offered has none."""

    name: str
    arguments: str = "{}"


class OfFunction(msgspec.Struct):
    """A tool that is offered, a call of one, or the one that is to be called."""

    function: Function


class Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[OfFunction] | None = None

    @property
    def text(self) -> str:
        """What it says, calls included."""
        content = self.content or ""
        if not isinstance(content, str):
            content = " ".join(str(part.get("text", "")) for part in content)
        return " ".join([content, *(words(call.function) for call in self.tool_calls or ())])


def words(call: Function) -> str:
    """A call as the text that it is made of, which no message says."""
    return f"<|call|> {call.name} {call.arguments}"


def called(messages: Sequence[Message]) -> list[Function]:
    """The calls that were made already."""
    return [call.function for message in messages for call in message.tool_calls or ()]


def demanded(
    messages: Sequence[Message],
    tools: Sequence[OfFunction],
    choice: str | OfFunction | None,
) -> Function | None:
    """The call that the next message is to make; None if it is to be text."""
    if not tools or choice == "none":
        return None
    offered = [tool.function.name for tool in tools]
    asked = next((i for i in reversed(range(len(messages))) if messages[i].role == "user"), 0)
    answered = sum(message.role == "tool" for message in messages[asked:])
    said = [call for call in _said(messages[asked].text) if call.name in offered]
    if answered < len(said):
        return said[answered]
    if isinstance(choice, OfFunction):
        return Function(choice.function.name)
    return Function(offered[0]) if choice == "required" else None


def _said(message: str) -> Iterator[Function]:
    for name, arguments in _SAID.findall(message):
        try:
            yield Function(name, json.dumps(json.loads(arguments)))
        except ValueError:
            continue
