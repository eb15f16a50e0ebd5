"""Calls that name weights on disk, with --weights-root."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.fanout import shipped
from rollout_sched.integrations.gateway.control_plane.weight_protocol import ProtocolStep
from rollout_sched.integrations.vllm.weights import OutsideRoots, WeightRoots
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.integrations.vllm.test_checkpoint import safetensors

A = "http://a:1"
WHOLE = ProtocolStep.WHOLE


def rpc(method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"method": method, "args": list(args), "kwargs": kwargs}


#: Each call that can name weights, as its trainer writes it; PATH is where they lie.
CALLS = [
    ("/update_weights", {"weight_dir": "PATH"}),
    ("/update_weights", {"update_info": {"checkpoint": ["PATH"]}}),
    ("/collective_rpc", rpc("reload_weights", weights_path="PATH")),
    ("/collective_rpc", rpc("reload_weights", None, "PATH")),
    ("/collective_rpc", rpc("update_weights_from_path", "PATH")),
    ("/collective_rpc", rpc("areal_update_weights_lora", lora_model_path="PATH")),
    ("/update_weights_from_disk", {"model_path": "PATH"}),
    ("/areal_update_weights", {"model_path": "PATH"}),
    ("/areal_update_weights_lora", {"lora_model_path": "PATH", "lora_name": "a"}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "PATH"}),
    ("/load_lora_adapter", {"lora_name": "a", "lora_path": "PATH"}),
    ("/skyrl/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "PATH"}),
    ("/fetch_weights", {"target_version": 3, "sync_dir": "PATH"}),
    ("/fetch_weights", {"target_version": 3, "uri": "PATH"}),
]

#: And what nobody knows: a field whose name says that it is a path.
UNHEARD_OF = [
    ("/collective_rpc", rpc("save_sharded_state", path="PATH")),
    ("/collective_rpc", rpc("unheard_of", {"modelPath": ["PATH"]})),
    ("/unheard_of", {"deep": [{"cache_dir": {"x": "PATH"}}]}),
    ("/v1/rl/engine/unheard_of", {"files": ["PATH"]}),
    ("/v1/rl/engine/update_weights", {"weight_dir": "PATH"}),
    ("/v1/rl/workers/ID/engine/update_weights", {"weight_dir": "PATH"}),
]

#: Or one whose name does not, where a relative path may be anything else.
OTHERS = [
    ("/unheard_of", {"deep": [{"x": "PATH"}]}),
    ("/unheard_of", {"PATH": 1}),
    ("/update_weights", {"weight_dir": "{root}/v1", "x": "PATH"}),
    ("/v1/rl/workers/ID/engine/unheard_of", {"x": "PATH"}),
]


def naming(body: Any, path: str, root: Path) -> Any:
    return json.loads(json.dumps(body).replace("PATH", path).replace("{root}", str(root)))


async def sent(house: House, path: str, body: Any, named: str, root: Path) -> tuple[int, Any]:
    _, workers = await house.ask("GET", "/workers")
    asked = path.replace("ID", workers["workers"][0]["id"])
    return await house.ask("POST", asked, naming(body, named, root))


async def resolved(roots: WeightRoots, path: str, body: bytes, query: str = "") -> bytes:
    return await roots.resolve_call(query, body, shipped().path_fields("POST", path, body))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "ckpt" / "v1").mkdir(parents=True)
    (tmp_path / "ckpt" / "v1" / "model.safetensors").write_bytes(safetensors())
    (tmp_path / "ckpt" / "away").symlink_to("/etc")
    (tmp_path / "ckpt" / "latest").symlink_to("v1")
    (tmp_path / "ckpt" / "mixed").mkdir()
    (tmp_path / "ckpt" / "mixed" / "model.safetensors").symlink_to("/etc/passwd")
    return tmp_path / "ckpt"


def test_every_row_that_loads_from_disk_is_tried() -> None:
    by_transfer = {"/areal_update_weights_xccl", "/areal_update_weights_lora_xccl"}
    by_transfer |= {"/update_weights_from_ipc"}
    whole = {path for (_, path), rule in shipped().calls.items() if rule.update is WHOLE}
    assert whole - by_transfer <= {path for path, _ in CALLS}


def elsewhere() -> Iterator[tuple[str, Any, str]]:
    """Calls with paths that lead elsewhere."""
    for path, body in (*CALLS, *UNHEARD_OF, *OTHERS):
        for away in ("/etc/x", "{root}/../x", "{root}/away/x", "{root}/mixed", "../x", " /etc"):
            yield path, body, away
    for path, body in (*CALLS, *UNHEARD_OF):
        yield path, body, "org/model"


@pytest.mark.parametrize(("path", "body", "away"), list(elsewhere()))
async def test_paths_that_lead_elsewhere_reach_no_instance(
    path: str, body: Any, away: str, root: Path
) -> None:
    instance = Upstream(A)
    async with House(instance, weights_roots=[root]) as house:
        status, said = await sent(house, path, body, away.format(root=root), root)
        assert status == 403, said
        assert "--weights-root" in said["error"]["message"]
        assert str(root) in said["error"]["message"]
        assert not instance.asked


@pytest.mark.real_time
@pytest.mark.parametrize(("path", "body"), [*CALLS, *UNHEARD_OF, *OTHERS])
async def test_instances_are_sent_the_resolved_path(path: str, body: Any, root: Path) -> None:
    roots = WeightRoots([root])
    for given, sent_on in (("v1", "v1"), ("latest", "v1"), ("later/../v1", "v1"), ("new", "new")):
        told = json.dumps(naming(body, f"{root}/{given}", root)).encode()
        passed = await resolved(roots, path.removeprefix("/v1/rl/engine"), told)
        assert json.loads(passed) == naming(body, f"{root}/{sent_on}", root)


@pytest.mark.parametrize("path", ["/update_weights", "/unheard_of", "/v1/rl/engine/unheard_of"])
async def test_what_an_instance_gets_is_what_was_checked(path: str, root: Path) -> None:
    """A server that takes the first of two equal fields would load the other path."""
    instance = Upstream(A)
    async with House(instance, weights_roots=[root]) as house:
        twice = f'{{"weight_dir": "/etc", "weight_dir": "{root}/latest"}}'
        async with house.session.post(path, data=twice, headers=house.auth) as response:
            assert response.status == 200
        (asked,) = instance.asked
        assert asked["body"] == f'{{"weight_dir":"{root}/v1"}}'


@pytest.mark.parametrize("query", ["weight_dir=x", "x=/etc/x", "x=%2Fetc", "x=a/../../b"])
async def test_a_path_in_the_query_reaches_no_instance(query: str, root: Path) -> None:
    instance = Upstream(A)
    async with House(instance, weights_roots=[root]) as house:
        for path in ("/update_weights", "/unheard_of", "/v1/rl/engine/unheard_of"):
            status, said = await house.ask("POST", f"{path}?level=1&{query}")
            assert (status, "in the query" in said["error"]["message"]) == (403, True)
        assert not instance.asked


@pytest.mark.parametrize("body", [b"\xff\xfe{\x00}\x00", b"{", b"[" * 100_000, b'{"x": NaN}'])
def test_a_body_that_cannot_be_read_is_not_passed_on(body: bytes, root: Path) -> None:
    """A server may be able to: Python's JSON reads UTF-16, and NaN."""
    with pytest.raises(CallerError, match="--weights-root"):
        asyncio.run(resolved(WeightRoots([root]), "/update_weights", body))


def test_without_roots_and_without_a_body_nothing_is_looked_at(root: Path) -> None:
    asyncio.run(resolved(WeightRoots(), "/update_weights", b"\xff"))
    asyncio.run(resolved(WeightRoots([root]), "/pause", b""))


def test_values_that_are_no_paths_pass(root: Path) -> None:
    handles = {"update_info": {"names": ["model.layers.0"], "ipc_handles": "gASV/+=="}}
    body = json.dumps(handles).encode()
    asyncio.run(resolved(WeightRoots([root]), "/update_weights", body))


@pytest.mark.parametrize("route", ["/admin/weights", "/rollout/v1/weights"])
async def test_published_paths_lie_within_the_roots(route: str, root: Path) -> None:
    instance = Upstream(A)
    async with House(instance, weights_roots=[root]) as house:
        outside = [
            {"reload": {"path": "/etc"}},
            {"reload": {"path": f"{root}/../{{version}}"}},
            {"reload": {"path": f"{root}/away", "visible_here": False}},
            {"reload": {"path": "org/model", "visible_here": False}},
            {"transfer": {"update_info": {"path": "/etc"}}},
            {"transfer": {"update_info": [{"weight_dir": "org/model"}]}},
            {"transfer": {"update_info": {}, "init_info": {"x": f"{root}/away"}}},
        ]
        for how in outside:
            status, said = await house.ask("POST", route, {"version": 1, **how})
            assert (status, "--weights-root" in said["error"]["message"]) == (403, True)
        _, state = await house.ask("GET", "/admin/state")
        assert state["version"] == 0
        body = {"version": 1, "reload": {"path": f"{root}/v{{version}}"}}
        assert (await house.ask("POST", route, body))[0] == 202


def test_a_link_that_is_bent_after_the_publication_is_seen_before_the_load(root: Path) -> None:
    from rollout_sched.integrations.vllm.weights import ReloadFromDisk
    from tests.integrations.vllm.test_weights import Recorder

    loader = ReloadFromDisk(root / "v1", visible_here=False, roots=WeightRoots([root]))
    asyncio.run(loader.check(1))
    (root / "v1").rename(root / "v0")
    (root / "v1").symlink_to("/etc")
    client = Recorder()
    loader = ReloadFromDisk(root / "v1", visible_here=False, roots=WeightRoots([root]))
    with pytest.raises(OutsideRoots):
        asyncio.run(loader(client, 1))
    assert client.calls == []
