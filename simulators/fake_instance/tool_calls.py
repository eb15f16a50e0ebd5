"""Tool calls on demand: which call answers a chat, and how its messages define it.

A request with `tools` is answered with a tool call if its last user message has one, as in
`call add {"a": 1, "b": 2}`. Several calls in a message are made one after the other, each when the
one before was answered. If `tool_choice` demands a call and no message has one, the tool that it
names, or the first, is called without arguments; "none" is answered with text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

_SAID = re.compile(r"\bcall (\w+) (\{[^{}]*\})")


class Function(msgspec.Struct):
    """The function of a call; `arguments` is a JSON object as text. An offered tool has none."""

    name: str
    arguments: str = "{}"


class OfFunction(msgspec.Struct):
    """An offered tool, a call of one, or the one that must be called."""

    function: Function


class Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[OfFunction] | None = None

    @property
    def text(self) -> str:
        """Its text, including calls."""
        content = self.content or ""
        if not isinstance(content, str):
            content = " ".join(str(part.get("text", "")) for part in content)
        return " ".join([content, *(words(call.function) for call in self.tool_calls or ())])


def words(call: Function) -> str:
    """The text that stands for a call in the tokens; no message contains it."""
    return f"<|call|> {call.name} {call.arguments}"


def called(messages: Sequence[Message]) -> list[Function]:
    """The calls that were already made."""
    return [call.function for message in messages for call in message.tool_calls or ()]


def demanded(
    messages: Sequence[Message],
    tools: Sequence[OfFunction],
    choice: str | OfFunction | None,
) -> Function | None:
    """The call that the next message must make; None if it must be text."""
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
