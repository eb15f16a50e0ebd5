"""Servers that are named actors join when they tell their URL, and go with their name."""

from __future__ import annotations

import asyncio
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.ray.servers import (
    POLLS_PER_QUESTION,
    ActorName,
    Cluster,
    NamedServers,
    pattern_of,
    ports,
    running,
    url_of,
)


class Names(Cluster):
    """A cluster whose actors tell what a test says; an exception is raised."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.methods: list[str] = []

    def names(self) -> list[ActorName]:
        return [ActorName("trainers", name) for name in self.told]

    async def ask(self, actor: ActorName, method: str) -> Any:
        self.methods.append(method)
        told = self.told[actor.name]
        if isinstance(told, Exception):
            raise told
        return told


class Book:
    """The instances that are here. One of them is refused."""

    def __init__(self, refused: str = "") -> None:
        self.here: list[str] = []
        self._refused = refused

    async def add(self, url: str) -> None:
        if url == self._refused:
            raise CallerError("it is no use")
        self.here.append(url)

    async def remove(self, url: str) -> None:
        self.here.remove(url)

    def following(self, cluster: Names) -> NamedServers:
        return NamedServers("vllm-*", "address", self.add, self.remove, cluster)


async def test_servers_join_and_leave_with_their_names() -> None:
    cluster = Names({"vllm-0": "http://a:1/", "vllm-1": ("b", 2), "trainer": "http://c:3"})
    book = Book()
    servers = book.following(cluster)
    await servers.follow()
    assert sorted(book.here) == ["http://a:1", "http://b:2"]
    assert cluster.methods == ["address", "address"]
    del cluster.told["vllm-0"]
    cluster.told["vllm-2"] = "d:4"
    await servers.follow()
    assert sorted(book.here) == ["http://b:2", "http://d:4"]


async def test_a_server_that_moved_is_found_at_its_new_url() -> None:
    cluster = Names({"vllm-0": "http://a:1", "vllm-1": "http://b:2"})
    book = Book()
    servers = book.following(cluster)
    await servers.follow()
    cluster.told = {"vllm-0": "http://a:7", "vllm-1": RuntimeError("busy")}
    for _ in range(POLLS_PER_QUESTION):
        await servers.follow()
    assert sorted(book.here) == ["http://a:7", "http://b:2"]
    assert cluster.methods == ["address"] * 4


async def test_a_server_without_url_is_asked_again_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Names({"vllm-0": RuntimeError("starting"), "vllm-1": "http://b:2"})
    book = Book()
    servers = book.following(cluster)
    for _ in range(3):
        await servers.follow()
    assert book.here == ["http://b:2"]
    cluster.told["vllm-0"] = "http://a:1"
    await servers.follow()
    assert sorted(book.here) == ["http://a:1", "http://b:2"]
    assert caplog.text.count("vllm-0") == 1


async def test_a_refused_server_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    book = Book(refused="http://a:1")
    servers = book.following(Names({"vllm-0": "http://a:1"}))
    await servers.follow()
    await servers.follow()
    assert not book.here
    assert caplog.text.count("it is no use") == 1


async def test_servers_are_followed_until_the_close() -> None:
    book, here = Book(), asyncio.Event()

    async def add(url: str) -> None:
        here.set()

    servers = NamedServers("*", "url", add, book.remove, Names({"vllm-0": "a:1"}))
    servers.open()
    async with asyncio.timeout(10):
        await here.wait()
    await servers.close()


@pytest.mark.parametrize(
    ("told", "url"),
    [
        ("http://a:1", "http://a:1"),
        ("https://a:1/v/", "https://a:1/v"),
        ("a:1", "http://a:1"),
        (("a", 1), "http://a:1"),
        (["::1", "1"], "http://[::1]:1"),
    ],
)
def test_a_server_may_name_its_url_in_several_ways(told: Any, url: str) -> None:
    assert url_of(told) == url


@pytest.mark.parametrize("told", [None, 1, ("a",), b"a:1"])
def test_other_answers_are_no_url(told: Any) -> None:
    with pytest.raises(ValueError, match="must return its URL"):
        url_of(told)


# -- Which replicas of Ray Serve are running, and which of them have an address of their own --


def replica(name: str, state: str) -> dict[str, Any]:
    return {
        "replica_id": name,
        "actor_name": f"SERVE_REPLICA::llm#VLLM#{name}",
        "state": state,
        "node_ip": "10.0.0.1",
    }


def test_only_running_replicas_count() -> None:
    states = ["STARTING", "UPDATING", "RECOVERING", "RUNNING", "STOPPING", "PENDING_MIGRATION"]
    replicas = [replica(state.lower(), state) for state in states]
    details = {"applications": {"llm": {"deployments": {"VLLM": {"replicas": replicas}}}}}
    here = ActorName("serve", "llm/VLLM/running")
    assert running(details) == {here: "SERVE_REPLICA::llm#VLLM#running"}
    assert not running({"applications": {}})


def test_the_ports_that_serve_opened_are_http_and_behind_the_applications_route() -> None:
    def group(protocol: str, route: str, name: str) -> Any:
        target = SimpleNamespace(ip="10.0.0.1", port=30000, name=name)
        return SimpleNamespace(protocol=protocol, route_prefix=route, targets=[target])

    groups = [group("HTTP", "/", "a"), group("HTTP", "/llm", "b"), group("gRPC", "/", "c")]
    assert ports(groups) == {"a": "http://10.0.0.1:30000", "b": "http://10.0.0.1:30000/llm"}


def test_a_pattern_means_an_application_or_one_of_its_deployments() -> None:
    name = "llm-7b/VLLM/x1"
    for pattern in ("llm-7b", "llm-*", "*", "llm-7b/VLLM", "*/VLLM"):
        assert fnmatchcase(name, pattern_of(pattern)), pattern
    for pattern in ("llm", "VLLM", "llm-7b/Router", "llm-7b/V"):
        assert not fnmatchcase(name, pattern_of(pattern)), pattern
