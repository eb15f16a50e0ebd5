"""How announced weights come to be loaded."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.gateway.control_plane import weights as module
from rollout_sched.integrations.gateway.control_plane.fanout import shipped
from rollout_sched.integrations.gateway.control_plane.weight_protocol import ProtocolStep
from rollout_sched.integrations.gateway.control_plane.weights import (
    NamedWeights,
    Reload,
    Transfer,
    WeightLoaders,
    WeightUpdate,
)
from rollout_sched.integrations.vllm import weights
from rollout_sched.integrations.vllm.weights import OutsideRoots, WeightRoots
from rollout_sched.live.driver import Driver
from rollout_sched.live.settings import Settings
from tests.core.told import make_scheduler
from tests.integrations.gateway.house import House, Upstream, run
from tests.integrations.vllm.test_checkpoint import safetensors
from tests.live.scripted import Scripted, until


class Loading(Scripted):
    """An instance that notes what it is made to load."""

    started_at = 1.0

    async def collective_rpc(self, method: str, kwargs: Any, limit_s: float | None = None) -> None:
        self.calls.append((method, kwargs))

    async def weight_transfer(self, step: str, body: Any, limit_s: float | None = None) -> None:
        self.calls.append((step, body))


def make_driver() -> Driver:
    return Driver(make_scheduler(batching="sync"), settings=Settings(poll_s=0.01))


def test_exactly_one_way() -> None:
    for fields in ({}, {"applied": True, "reload": {"path": "/x"}}):
        with pytest.raises(msgspec.ValidationError, match="one of reload, transfer and applied"):
            msgspec.convert({"version": 1, **fields}, WeightUpdate)


def test_from_disk(tmp_path: Path) -> None:
    async def scene() -> None:
        driver, instance = make_driver(), Loading()
        weight_loaders = WeightLoaders(driver)
        path = str(tmp_path / "v{version}")
        with pytest.raises(CallerError, match="v7: no such folder"):
            await weight_loaders.of(WeightUpdate(7, reload=Reload(path)))
        elsewhere = await weight_loaders.of(
            WeightUpdate(7, reload=Reload(path, visible_here=False))
        )
        await elsewhere(instance, 7)
        assert instance.calls == [("reload_weights", {"weights_path": str(tmp_path / "v7")})]

    run(scene())


def test_by_transfer_each_instance_is_set_up_once() -> None:
    async def scene() -> None:
        driver, instance = make_driver(), Loading()
        weight_loaders = WeightLoaders(driver)
        init = {"port": 1}
        first = await weight_loaders.of(WeightUpdate(1, transfer=Transfer({"path": "one"}, init)))
        await first(instance, 1)
        second = await weight_loaders.of(
            WeightUpdate(2, transfer=Transfer([{"a": 1}, {"b": 2}], init))
        )
        await second(instance, 2)
        steps = [step for step, _ in instance.calls]
        assert steps.count("init_weight_transfer_engine") == 1
        updates = [body["update_info"] for step, body in instance.calls if step == "update_weights"]
        assert updates == [{"path": "one"}, {"a": 1}, {"b": 2}]
        instance.calls.clear()
        other = await weight_loaders.of(
            WeightUpdate(3, transfer=Transfer({"path": "x"}, {"port": 2}))
        )
        await other(instance, 3)
        assert instance.calls[0] == ("init_weight_transfer_engine", {"init_info": {"port": 2}})

    run(scene())


def test_an_old_version_is_refused_before_it_changes_what_is_known() -> None:
    """What the newest version needs for its update must not be overwritten by a refused one."""

    async def scene() -> None:
        driver, instance = make_driver(), Loading()
        weight_loaders = WeightLoaders(driver)
        newest = await weight_loaders.of(WeightUpdate(5, transfer=Transfer({"path": "right"})))
        driver.publish(5, newest)
        for version in (4, 5):
            with pytest.raises(CallerError, match="versions must increase"):
                await weight_loaders.of(WeightUpdate(version, transfer=Transfer({"path": "wrong"})))
        await newest(instance, 5)
        updates = [body["update_info"] for step, body in instance.calls if step == "update_weights"]
        assert updates == [{"path": "right"}]

    run(scene())


def test_of_two_that_are_checked_together_the_order_of_publishing_decides(tmp_path: Path) -> None:
    async def scene() -> None:
        driver = make_driver()
        weight_loaders = WeightLoaders(driver)
        for version in (1, 2):
            (tmp_path / f"v{version}").mkdir()
            (tmp_path / f"v{version}" / "model.bin").write_bytes(b"x")
        reload = Reload(str(tmp_path / "v{version}"))
        one, two = await asyncio.gather(
            *(weight_loaders.of(WeightUpdate(version, reload=reload)) for version in (1, 2))
        )
        driver.publish(2, two)
        with pytest.raises(CallerError):
            driver.publish(1, one)
        assert driver.pump.scheduler.books.progress.version == 2

    run(scene())


def test_a_checkpoint_on_a_mount_that_hangs_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, asked = threading.Event(), []

    def hang(folder: Path) -> None:
        asked.append(folder)
        hanging.wait(20)

    monkeypatch.setattr(weights, "check_checkpoint", hang)

    async def scene() -> None:
        publishing = asyncio.create_task(
            WeightLoaders(make_driver()).of(WeightUpdate(1, reload=Reload(str(tmp_path))))
        )
        turns = 0
        while not asked:
            await asyncio.sleep(0.001)
        for turns in range(20):  # noqa: B007
            await asyncio.sleep(0.001)
        assert turns == 19
        assert not publishing.done()
        publishing.cancel()

    begun = time.monotonic()
    run(scene())
    assert time.monotonic() - begun < 5  # nor does the end of the loop wait for it
    hanging.set()


def test_who_was_not_there_when_the_trainer_loaded_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It joined while the trainer said so."""
    monkeypatch.setattr(module, "LOOK_S", 0.001)

    async def scene() -> None:
        driver, here, late = make_driver(), Loading("here"), Loading("late")
        await driver.add_instance(here)
        applied = await WeightLoaders(driver).of(WeightUpdate(1, applied=True))
        await driver.add_instance(late)
        driver.publish(1, applied)
        await until(lambda: ("version", 1) in here.calls)
        await asyncio.sleep(0.02)
        assert ("version", 1) not in late.calls
        late.description = msgspec.structs.replace(late.description, version=1)
        await until(lambda: ("version", 1) in late.calls)
        await driver.close()

    run(scene())


def test_who_comes_later_waits_until_it_says_that_it_has_it() -> None:
    async def scene() -> None:
        driver, late = make_driver(), Loading("late")
        driver.publish(1, await WeightLoaders(driver).of(WeightUpdate(1, applied=True)))
        assert await driver.add_instance(late) is None
        supervisor = driver.supervisors["late"]
        assert "version 0, the trainer is at 1" in supervisor.reason
        late.description = msgspec.structs.replace(late.description, version=1)
        await until(lambda: supervisor.joined)
        assert ("version", 1) not in late.calls, "it has that label already"
        await driver.close()

    run(scene())


def test_who_was_restarted_has_lost_what_the_trainer_loaded() -> None:
    async def scene() -> None:
        driver, instance = make_driver(), Loading()
        await driver.add_instance(instance)
        driver.publish(1, await WeightLoaders(driver).of(WeightUpdate(1, applied=True)))
        await until(lambda: ("version", 1) in instance.calls)
        instance.dead = True
        await until(lambda: not driver.supervisors["i0"].joined)
        instance.calls.clear()
        instance.description = msgspec.structs.replace(instance.description, started_at=2.0)
        instance.dead = False
        await until(lambda: "trainer is at 1" in driver.supervisors["i0"].reason)
        assert instance.calls == []
        instance.description = msgspec.structs.replace(instance.description, version=1)
        await until(lambda: driver.supervisors["i0"].joined)
        await driver.close()

    run(scene())


# -- --weights-root: no call through the gateway names weights that lie elsewhere --

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
def test_paths_that_lead_elsewhere_reach_no_instance(
    path: str, body: Any, away: str, root: Path
) -> None:
    async def scene() -> None:
        instance = Upstream(A)
        async with House(instance, weights_roots=[root]) as house:
            _, workers = await house.ask("GET", "/workers")
            asked = path.replace("ID", workers["workers"][0]["id"])
            status, said = await house.ask("POST", asked, naming(body, away.format(root=root)))
            assert status == 403, said
            assert "--weights-root" in said["error"]["message"]
            assert str(root) in said["error"]["message"]
            assert not instance.asked

    run(scene())


@pytest.mark.parametrize(("path", "body"), [*CALLS, *OTHERS])
def test_paths_within_pass(path: str, body: Any, root: Path) -> None:
    checks = NamedWeights(WeightRoots([root])).check

    async def scene() -> None:
        for within in (root, root / "v1", root / "later"):
            told = json.dumps(naming(body, str(within))).encode()
            await checks("POST", path.removeprefix("/v1/rl/engine"), told)

    asyncio.run(scene())


@pytest.mark.parametrize("body", [b"\xff\xfe{\x00}\x00", b"{", b"[" * 100_000, b'{"x": NaN}'])
def test_a_body_that_cannot_be_read_is_not_passed_on(body: bytes, root: Path) -> None:
    """A server may be able to: Python's JSON reads UTF-16, and NaN."""
    with pytest.raises(CallerError, match="--weights-root"):
        asyncio.run(NamedWeights(WeightRoots([root])).check("POST", "/update_weights", body))


def test_without_roots_and_without_a_body_nothing_is_looked_at(root: Path) -> None:
    asyncio.run(NamedWeights(WeightRoots()).check("POST", "/update_weights", b"\xff"))
    asyncio.run(NamedWeights(WeightRoots([root])).check("POST", "/pause", b""))


def test_what_is_no_path_passes(root: Path) -> None:
    handles = {"update_info": {"names": ["model.layers.0"], "ipc_handles": "gASV/+=="}}
    body = json.dumps(handles).encode()
    asyncio.run(NamedWeights(WeightRoots([root])).check("POST", "/update_weights", body))


@pytest.mark.parametrize("route", ["/admin/weights", "/rollout/v1/weights"])
def test_what_is_published_lies_within(route: str, root: Path) -> None:
    async def scene() -> None:
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

    run(scene())


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
