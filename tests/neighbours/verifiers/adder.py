"""An environment with a tool: sums, an agent's loop in process, and a reward for calling the tool.

verifiers finds it by its module's name, as it would an installed package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["AdderHarness", "AdderTaskset"]

#: What is asked for in words, for servers that read chats, and its sums.
QUESTION = 'Please call add {"a": 1, "b": 2} and then call add {"a": 3, "b": 4}.'
SUMS = [3, 7]

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class AdderTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def added(self, trace: vf.Trace) -> float:
        """The share of the sums that the tool was asked for."""
        said = [node.message.content for node in trace.nodes if node.message.role == "tool"]
        return sum(str(one) in said for one in SUMS) / len(SUMS)


class AdderTaskset(vf.Taskset[AdderTask]):
    def load(self) -> Iterable[AdderTask]:
        yield AdderTask(vf.TaskData(prompt=QUESTION), self.config.task)


class AdderHarness(vf.Harness):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            while True:
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=[ADD]
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return ProgramResult(0, "", "")
                for call in message.tool_calls:
                    asked = json.loads(call.function.arguments)
                    said = str(asked["a"] + asked["b"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
