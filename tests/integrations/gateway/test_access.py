"""Whose every route is, and that no other key opens it. A new route must be put in this table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from aiohttp import web

from rollout_sched.integrations.gateway.control_plane.app import ACCESS
from rollout_sched.integrations.gateway.control_plane.auth import Access
from rollout_sched.integrations.gateway.control_plane.fanout import shipped
from rollout_sched.integrations.vllm.protocol.endpoints import ENDPOINTS
from tests.integrations.gateway.gateway_fixture import House, Upstream

A, B = "http://a:1", "http://b:1"
REFUSED = (401, 403)

#: Which paths are whose, but for those of the table in fanout_table.toml.
WHOSE = {
    Access.OPEN: "/ /health /liveness /ping /version /metrics",
    Access.CLIENT: "/v1/models /finish_session",
    Access.TRAINER: "/rollout/v1/groups /rollout/v1/groups/close /rollout/v1/groups/unknown "
    "/rollout/v1/batches/next /rollout/v1/batches/renew /rollout/v1/state /rollout/v1/weights "
    "/rollout/v1/mismatch /v1/rl/workers /v1/rl/workers/{id} "
    "/abort_request /abort_requests /inference/v1/abort_requests",
    Access.ADMIN: "/admin/instances /admin/instances/{id} /admin/instances/{id}/drain /admin/pause "
    "/admin/resume /admin/live /admin/state /admin/weights /workers /workers/{id} /add_worker "
    "/remove_worker /list_workers /v1/rl/workers/{id}/engine/{path} /v1/rl/engine/{path}",
}

#: What is passed on is whose it is by what it asks.
PASSED_ON = {
    ("POST", "/tokenize"): Access.CLIENT,
    ("POST", "/v1/embeddings"): Access.CLIENT,
    ("POST", "/skyrl/v1/generate"): Access.CLIENT,
    ("GET", "/server_info"): Access.TRAINER,
    ("GET", "/unheard_of"): Access.ADMIN,
    ("POST", "/unheard_of"): Access.ADMIN,
    ("GET", "/pause"): Access.ADMIN,
    ("POST", "/v1/rl/workers/x/engine/pause"): Access.ADMIN,
    ("POST", "/v1/rl/engine/scale_elastic_ep"): Access.ADMIN,
    ("POST", "/v1/rl/engine/unheard_of"): Access.ADMIN,
    ("PUT", "/v1/rl/engine/pause"): Access.ADMIN,
}


def expected() -> dict[str, Access]:
    """The class of every path."""
    whose = {path: access for access, paths in WHOSE.items() for path in paths.split()}
    for (_, path), rule in shipped().calls.items():
        if rule.to != "one":
            whose[path] = Access.ADMIN if rule.to == "refuse" else Access.TRAINER
        if rule.to != "refuse":
            whose[f"/v1/rl/engine{path}"] = Access.TRAINER
    return whose


def routes_of(app: web.Application) -> list[tuple[str, str]]:
    """Every method and path but what is passed on, with names for what a path leaves open."""
    return [
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.resource.canonical != "/{path}"
    ]


def called(method: str, path: str) -> tuple[str, str]:
    """An example of a route."""
    return "POST" if method == "*" else method, re.sub(r"\{\w+\}", "x", path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Options with two keys of each kind: an old one, and one that takes its place."""
    options = {}
    for name in ("api", "trainer", "admin"):
        options[f"{name}_key_file"] = tmp_path / name
        (tmp_path / name).write_text(f"{name}-old\n{name}-new\n")
    return options


async def test_every_route_has_a_class(house) -> None:
    app = house.service.app
    told = {resource.canonical: access for resource, access in app[ACCESS].items()}
    assert {path for _, path in routes_of(app)} == set(told)
    assert told == expected()


@pytest.mark.parametrize(
    ("holder", "key"),
    [
        (Access.OPEN, ""),
        (Access.OPEN, "wrong"),
        *((Access.CLIENT, f"api-{age}") for age in ("old", "new")),
        *((Access.TRAINER, f"trainer-{age}") for age in ("old", "new")),
        *((Access.ADMIN, f"admin-{age}") for age in ("old", "new")),
    ],
)
async def test_a_key_opens_its_class_of_routes_and_none_above(
    holder: Access, key: str, files: dict[str, Path]
) -> None:
    """Whoever may enter is answered by the route itself, whatever it makes of an empty call."""
    async with House(Upstream(A), Upstream(B), **files) as house:
        house.auth = {"Authorization": f"Bearer {key}"} if key else {}
        whose = expected()
        calls = {route: whose[route[1]] for route in routes_of(house.service.app)} | PASSED_ON
        calls |= {("POST", path.decode()): Access.CLIENT for path in ENDPOINTS}
        for route, access in calls.items():
            if access > holder or route[1] in CHEAP:
                method, path = called(*route)
                status, said = await house.ask(method, path)
                assert (status in REFUSED) is (access > holder), (method, path, status, said)
        if holder is Access.OPEN:
            assert not any(instance.asked for instance in house.instances.values())


#: Of what a key opens, a call of each room: most of the others would begin something.
CHEAP = (
    *WHOSE[Access.OPEN].split(),
    *("/v1/models", "/tokenize", "/v1/completions", "/rollout/v1/state", "/v1/rl/workers"),
    *("/is_paused", "/v1/rl/engine/is_paused", "/server_info", "/admin/state", "/list_workers"),
    *("/workers", "/admin/instances", "/unheard_of", "/v1/rl/engine/unheard_of"),
)


async def test_keys_pass_neither_to_instances_nor_to_clients(files: dict[str, Path]) -> None:
    instance = Upstream(A)
    async with House(instance, **files) as house:
        for key, path in (("api-old", "/v1/embeddings"), ("admin-new", "/unheard_of")):
            house.auth = {"Authorization": f"Bearer {key}"}
            await house.ask("POST", path)
        assert [asked["headers"]["authorization"] for asked in instance.asked] == [
            "Bearer instance"
        ] * 2


async def test_trainers_keys_alone_close_the_administrators_routes(files: dict[str, Path]) -> None:
    options = {"trainer_key_file": files["trainer_key_file"]}
    async with House(Upstream(A), **options) as house:
        assert any("/admin is closed" in line for line in house.said)
        status, said = await house.ask("GET", "/admin/state")
        assert (status, "--admin-key-file" in said["error"]["message"]) == (403, True)
        assert (await house.ask("GET", "/rollout/v1/state"))[0] == 401
        house.auth = {"Authorization": "Bearer trainer-new"}
        assert (await house.ask("GET", "/rollout/v1/state"))[0] == 200
        assert (await house.ask("GET", "/admin/state"))[0] == 403
