"""How announced weights come to be loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm import weight_updates as module
from rollout_sched.integrations.vllm.weight_updates import (
    Reload,
    Transfer,
    WeightLoaders,
    WeightUpdate,
    update_of,
)
from rollout_sched.live.driver import Driver
from rollout_sched.live.settings import Settings
from tests.core.told import make_scheduler
from tests.live.scripted import Scripted, until


class Loading(Scripted):
    """An instance that notes what it is made to load."""

    started_at = 1.0
    labels: tuple[str, ...] = ()

    async def world_size(self) -> int:
        return 2

    async def collective_rpc(self, method: str, kwargs: Any, limit_s: float | None = None) -> None:
        self.calls.append((method, kwargs))

    async def weight_transfer(self, step: str, body: Any, limit_s: float | None = None) -> None:
        self.calls.append((step, body))


def make_driver() -> Driver:
    return Driver(make_scheduler(batching="sync"), settings=Settings(poll_s=0.01))


def test_exactly_one_way() -> None:
    for fields in ({}, {"applied": True, "reload": {"path": "/x"}}):
        with pytest.raises(msgspec.ValidationError, match="reload, transfer, by_label and applied"):
            msgspec.convert({"version": 1, **fields}, WeightUpdate)


async def test_from_disk(tmp_path: Path) -> None:
    driver, instance = make_driver(), Loading()
    weight_loaders = WeightLoaders(driver)
    path = str(tmp_path / "v{version}")
    with pytest.raises(CallerError, match="v7: no such folder"):
        await weight_loaders.loader_for(WeightUpdate(7, reload=Reload(path)))
    elsewhere = await weight_loaders.loader_for(
        WeightUpdate(7, reload=Reload(path, visible_here=False))
    )
    await elsewhere(instance, 7)
    assert instance.calls == [("reload_weights", {"weights_path": str(tmp_path / "v7")})]


async def test_by_transfer_each_instance_is_set_up_once() -> None:
    driver, instance = make_driver(), Loading()
    weight_loaders = WeightLoaders(driver)
    init = {"port": 1}
    first = await weight_loaders.loader_for(
        WeightUpdate(1, transfer=Transfer({"path": "one"}, init))
    )
    await first(instance, 1)
    second = await weight_loaders.loader_for(
        WeightUpdate(2, transfer=Transfer([{"a": 1}, {"b": 2}], init))
    )
    await second(instance, 2)
    steps = [step for step, _ in instance.calls]
    assert steps.count("init_weight_transfer_engine") == 1
    updates = [body["update_info"] for step, body in instance.calls if step == "update_weights"]
    assert updates == [{"path": "one"}, {"a": 1}, {"b": 2}]
    instance.calls.clear()
    other = await weight_loaders.loader_for(
        WeightUpdate(3, transfer=Transfer({"path": "x"}, {"port": 2}))
    )
    await other(instance, 3)
    assert instance.calls[0] == ("init_weight_transfer_engine", {"init_info": {"port": 2}})


async def test_an_old_version_is_refused_before_it_changes_what_is_known() -> None:
    """What the newest version needs for its update must not be overwritten by a refused one."""
    driver, instance = make_driver(), Loading()
    weight_loaders = WeightLoaders(driver)
    newest = await weight_loaders.loader_for(WeightUpdate(5, transfer=Transfer({"path": "right"})))
    driver.publish(5, newest)
    for version in (4, 5):
        with pytest.raises(CallerError, match="versions must increase"):
            await weight_loaders.loader_for(
                WeightUpdate(version, transfer=Transfer({"path": "wrong"}))
            )
    await newest(instance, 5)
    updates = [body["update_info"] for step, body in instance.calls if step == "update_weights"]
    assert updates == [{"path": "right"}]


async def test_an_instance_absent_at_the_load_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It joined while the trainer said so."""
    monkeypatch.setattr(module, "POLL_S", 0.001)
    driver, here, late = make_driver(), Loading("here"), Loading("late")
    await driver.add_instance(here)
    applied = await WeightLoaders(driver).loader_for(WeightUpdate(1, applied=True))
    await driver.add_instance(late)
    driver.publish(1, applied)
    await until(lambda: ("version", 1) in here.calls)
    await asyncio.sleep(0.02)
    assert ("version", 1) not in late.calls
    late.describes(version=1)
    await until(lambda: ("version", 1) in late.calls)
    await driver.close()


async def test_a_late_instance_waits_until_it_reports_the_version() -> None:
    driver, late = make_driver(), Loading("late")
    driver.publish(1, await WeightLoaders(driver).loader_for(WeightUpdate(1, applied=True)))
    assert await driver.add_instance(late) is None
    supervisor = driver.supervisors["late"]
    assert "version 0, the trainer is at 1" in supervisor.reason
    late.describes(version=1)
    await until(lambda: supervisor.joined)
    assert ("version", 1) not in late.calls, "it has that label already"
    await driver.close()


async def test_a_restart_loses_weights_loaded_by_the_trainer() -> None:
    driver, instance = make_driver(), Loading()
    await driver.add_instance(instance)
    driver.publish(1, await WeightLoaders(driver).loader_for(WeightUpdate(1, applied=True)))
    await until(lambda: ("version", 1) in instance.calls)
    instance.dead = True
    await until(lambda: not driver.supervisors["i0"].joined)
    instance.calls.clear()
    instance.describes(started_at=2.0)
    instance.dead = False
    await until(lambda: "trainer is at 1" in driver.supervisors["i0"].reason)
    assert instance.calls == []
    instance.describes(version=1)
    await until(lambda: driver.supervisors["i0"].joined)
    await driver.close()


async def test_by_label_each_instance_loads_in_its_own_way(tmp_path: Path) -> None:
    """By host, by host and port, by a label and by "*"; the first that fits counts. The ranks of a
    transfer are those of its own label's instances. The store keeps the description."""
    driver = make_driver()
    names = ("http://node0:1", "http://node0:2", "http://node1:1", "http://node2:1")
    instances = [Loading(name) for name in names]
    instances[3].labels = ("far",)
    for instance in instances:
        await driver.add_instance(instance)
        instance.calls.clear()
    ways = {
        "node0:2": Reload("/disk/{version}", visible_here=False),
        "node0": Transfer({"ipc": 1}),
        "f*": Transfer({"tcp": 1}, {"rank_offset": 1, "port": 7}),
        "*": Reload("/shared/{version}", visible_here=False),
    }
    update = msgspec.json.decode(msgspec.json.encode(update_of(3, ways)), type=WeightUpdate)
    loader = await WeightLoaders(driver).loader_for(update)
    for instance in instances:
        await loader(instance, 3)
    ipc, disk, shared, tcp = [instance.calls for instance in instances]
    assert disk == [("reload_weights", {"weights_path": "/disk/3"})]
    assert shared == [("reload_weights", {"weights_path": "/shared/3"})]
    assert ("update_weights", {"update_info": {"ipc": 1}}) in ipc
    setup = ("init_weight_transfer_engine", {"init_info": {"rank_offset": 1, "port": 7}})
    dealt = {**setup[1]["init_info"], "world_size": 3}
    assert tcp[0] == (setup[0], {"init_info": dealt})
    assert ("update_weights", {"update_info": {"tcp": 1}}) in tcp
    await driver.close()


async def test_by_label_an_instance_without_a_loader_is_named_before_anything_is_changed() -> None:
    driver, instance = make_driver(), Loading("http://node1:1")
    await driver.add_instance(instance)
    update = update_of(1, {"node0": Transfer({})})
    with pytest.raises(CallerError, match="no loader of node0 is for instance http://node1:1"):
        await WeightLoaders(driver).loader_for(update)
    await driver.close()
