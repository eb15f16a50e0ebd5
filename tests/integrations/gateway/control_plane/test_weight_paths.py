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

#: And what nobody knows, where only a whole path is seen to be one.
OTHERS = [
    ("/collective_rpc", rpc("save_sharded_state", path="PATH")),
    ("/unheard_of", {"deep": [{"x": "PATH"}]}),
    ("/v1/rl/engine/unheard_of", {"x": "PATH"}),
    ("/v1/rl/engine/update_weights", {"weight_dir": "PATH"}),
    ("/v1/rl/workers/ID/engine/unheard_of", {"x": "PATH"}),
]


def naming(body: Any, path: str) -> Any:
    return json.loads(json.dumps(body).replace("PATH", path))


async def check(roots: WeightRoots, path: str, body: bytes) -> None:
    await roots.check_body(body, shipped().path_fields("POST", path, body))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "ckpt" / "v1").mkdir(parents=True)
    (tmp_path / "ckpt" / "v1" / "model.safetensors").write_bytes(safetensors())
    (tmp_path / "ckpt" / "away").symlink_to("/etc")
    return tmp_path / "ckpt"


def test_every_row_that_loads_from_disk_says_where_its_path_stands() -> None:
    named = {path for path, _ in CALLS}
    with_paths = {path for (_, path), rule in shipped().calls.items() if rule.paths}
    assert with_paths | {"/collective_rpc"} == named
    by_transfer = ("/areal_update_weights_xccl", "/areal_update_weights_lora_xccl")
    for (_, path), rule in shipped().calls.items():
        if rule.update is ProtocolStep.WHOLE and path not in by_transfer:
            assert rule.paths, path


def elsewhere() -> Iterator[tuple[str, Any, str]]:
    """Calls with paths that lead elsewhere; relative ones where the table knows them as paths."""
    for path, body in (*CALLS, *OTHERS):
        yield from ((path, body, away) for away in ("/etc/x", "{root}/../x", "{root}/away/x"))
        if (path, body) in CALLS and "update_info" not in body:
            yield from ((path, body, away) for away in ("../x", "org/model"))


@pytest.mark.parametrize(("path", "body", "away"), list(elsewhere()))
async def test_paths_that_lead_elsewhere_reach_no_instance(
    path: str, body: Any, away: str, root: Path
) -> None:
    instance = Upstream(A)
    async with House(instance, weights_roots=[root]) as house:
        _, workers = await house.ask("GET", "/workers")
        asked = path.replace("ID", workers["workers"][0]["id"])
        status, said = await house.ask("POST", asked, naming(body, away.format(root=root)))
        assert status == 403, said
        assert "--weights-root" in said["error"]["message"]
        assert str(root) in said["error"]["message"]
        assert not instance.asked


@pytest.mark.real_time
@pytest.mark.parametrize(("path", "body"), [*CALLS, *OTHERS])
async def test_paths_within_pass(path: str, body: Any, root: Path) -> None:
    roots = WeightRoots([root])
    for within in (root, root / "v1", root / "later"):
        told = json.dumps(naming(body, str(within))).encode()
        await check(roots, path.removeprefix("/v1/rl/engine"), told)


@pytest.mark.parametrize("body", [b"\xff\xfe{\x00}\x00", b"{", b"[" * 100_000, b'{"x": NaN}'])
def test_a_body_that_cannot_be_read_is_not_passed_on(body: bytes, root: Path) -> None:
    """A server may be able to: Python's JSON reads UTF-16, and NaN."""
    with pytest.raises(CallerError, match="--weights-root"):
        asyncio.run(check(WeightRoots([root]), "/update_weights", body))


def test_without_roots_and_without_a_body_nothing_is_looked_at(root: Path) -> None:
    asyncio.run(check(WeightRoots(), "/update_weights", b"\xff"))
    asyncio.run(check(WeightRoots([root]), "/pause", b""))


def test_values_that_are_no_paths_pass(root: Path) -> None:
    handles = {"update_info": {"names": ["model.layers.0"], "ipc_handles": "gASV/+=="}}
    body = json.dumps(handles).encode()
    asyncio.run(check(WeightRoots([root]), "/update_weights", body))


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
