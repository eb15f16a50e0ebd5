"""LangGraph's ReAct agent, over LangChain's OpenAI client, through the gateway."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

from tests.neighbours.fleet import Fleet, fleet

#: What the simulated servers answer with two calls, one after the other, and then with text.
QUESTION = 'Please call add {"a": 1, "b": 2} and then call add {"a": 3, "b": 4}.'

#: Of home, so many others may be there that nobody leaves it (`margin` of `[affinity]`).
AGENTS = 3


@pytest.fixture(scope="module")
def ours() -> Iterator[Fleet]:
    """Where nothing but sessions keeps two turns together: requests are dealt out in turn."""
    fake = ["--speed", "50", "--median-tokens", "20"]
    with fleet(2, policy="round_robin_sync", fake=fake) as running:
        yield running


def agent(ours: Fleet, session: str = "", *, streaming: bool = False) -> tuple[Any, list[Any]]:
    """(a ReAct agent, what its tool is called with)."""
    called: list[Any] = []

    @tool
    def add(a: int, b: int) -> int:
        """The sum of two numbers."""
        called.append((a, b))
        return a + b

    model = ChatOpenAI(
        base_url=f"{ours.url}/v1",
        api_key="none",
        model=ours.model,
        streaming=streaming,
        include_response_headers=True,
        default_headers={"X-Session-ID": session} if session else None,
    )
    return create_react_agent(model, [add]), called


def ask(react: Any) -> list[Any]:
    return react.invoke({"messages": [("user", QUESTION)]})["messages"]


def instances(messages: list[Any]) -> list[str]:
    """Who made each of the agent's turns."""
    return [
        message.response_metadata["headers"]["x-rollout-sched-instance"]
        for message in messages
        if isinstance(message, AIMessage)
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_tool_is_called_and_its_answer_gone_on_from(ours: Fleet, streaming: bool) -> None:
    react, called = agent(ours, f"tool-{streaming}", streaming=streaming)
    messages = ask(react)
    assert called == [(1, 2), (3, 4)]
    kinds = [type(message) for message in messages[1:]]
    assert kinds == [AIMessage, ToolMessage, AIMessage, ToolMessage, AIMessage]
    assert [m.content for m in messages if isinstance(m, ToolMessage)] == ["3", "7"]
    assert messages[-1].content
    assert not messages[-1].tool_calls


def test_an_agent_s_session_is_on_one_instance(ours: Fleet) -> None:
    before = ours.gateway.metric("rollout_sched_session_moves_total")
    together = threading.Barrier(AGENTS)

    def play(number: int) -> list[str]:
        react, called = agent(ours, f"session-{number}")
        together.wait(60)
        made_by = instances(ask(react))
        assert len(called) == 2
        return made_by

    with ThreadPoolExecutor(AGENTS) as pool:
        turns = list(pool.map(play, range(AGENTS)))
    assert [len(made_by) for made_by in turns] == [3] * AGENTS
    assert [len(set(made_by)) for made_by in turns] == [1] * AGENTS
    assert ours.gateway.metric("rollout_sched_session_moves_total") == before


def test_who_names_no_session_goes_from_one_to_the_other(ours: Fleet) -> None:
    react, _ = agent(ours)
    assert len(set(instances(ask(react)))) == 2
