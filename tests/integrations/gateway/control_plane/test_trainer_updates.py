"""A trainer that loads weights through the gateway: gates, versions, labels, and what failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
import pytest

from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.live.instances.versions import THROUGH_US, US
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.integrations.gateway.test_fleet import fleet
from tests.live.scripted import until

A, B = "http://a:1", "http://b:1"
START, LOAD, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
CHUNK = {"update_info": {"names": ["w"]}}
FAILS = (500, {"error": "out of memory"})

Trainer = Callable[[str, Any], Any]


def two() -> tuple[Upstream, Upstream]:
    return Upstream(A), Upstream(B)


def paths_of(instance: Upstream) -> list[str]:
    return [asked["path"] for asked in instance.asked]


def version(house: House) -> int:
    return int(house.driver.view.run.version)


def gates(house: House) -> list[str]:
    return [house.driver.versions.gate(name) for name in (A, B)]


async def statuses(house: House, *calls: tuple[str, Any]) -> list[int]:
    return [(await house.ask("POST", path, body))[0] for path, body in calls]


async def test_gates_stay_closed_during_an_update_and_then_the_version_moves(
    house, first, second
) -> None:
    for path, body in ((START, {}), (LOAD, CHUNK), (LOAD, CHUNK)):
        assert await statuses(house, (path, body)) == [200]
        assert all(gates(house))
        assert version(house) == 0
    assert (await house.ask("GET", "/admin/state"))[1]["trainer_update"] == {
        "state": "begun",
        "failed": [],
        "remedy": "",
    }
    assert await statuses(house, (FINISH, {})) == [200]
    assert gates(house) == ["", ""]
    assert version(house) == 1
    for name, instance in house.instances.items():
        assert ("version", 1) in instance.calls  # its tokens are labelled
        served = house.driver.versions.version_of(name)
        assert (served.version, served.driven_by) == (1, THROUGH_US)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (LOAD, {"weight_dir": "/step_1"}),
        ("/collective_rpc", {"method": "reload_weights"}),
        ("/areal_update_weights", {"model_path": "/step_1"}),
        ("/areal_update_weights_xccl", {}),
        ("/update_weights_from_disk", {"model_path": "/step_1"}),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
        ("/skyrl/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
        ("/v1/rl/engine/update_weights", {"weight_dir": "/step_1"}),
    ],
)
async def test_a_call_that_is_the_whole_update(path: str, body: Any, house, first, second) -> None:
    assert await statuses(house, (path, body)) == [200]
    assert gates(house) == ["", ""]
    assert version(house) == 1


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/areal_set_update_weight_meta", "/v1/unload_lora_adapter"]
)
async def test_a_call_that_loads_nothing_moves_no_version(path: str, house, first, second) -> None:
    assert await statuses(house, (path, {"method": "sleep"})) == [200]
    assert version(house) == 0


async def test_half_loaded_weights_stop_generation(house, first, second) -> None:
    await statuses(house, ("/pause?mode=keep", {}), (START, {}))
    status, said = await house.ask("POST", "/resume")
    assert (status, "half loaded" in said["error"]["message"]) == (409, True)
    assert "/resume" not in paths_of(house.instances[A])  # type: ignore[arg-type]
    assert await statuses(house, (FINISH, {}), ("/resume", {})) == [200, 200]
    assert gates(house) == ["", ""]


async def test_a_call_that_failed_on_some_is_not_repeated_on_the_others(
    house, first, second
) -> None:
    second.answers[LOAD] = FAILS
    status, said = await house.ask("POST", LOAD, {"weight_dir": "/step_1"})
    assert (status, said["succeeded"], said["failed"][0]["url"]) == (502, 1, B)
    assert "a retry goes only to" in said["error"]["message"]
    assert all(gates(house))
    assert version(house) == 0
    state = (await house.ask("GET", "/admin/state"))[1]["trainer_update"]
    assert (state["failed"], "send it again" in state["remedy"]) == ([B], True)
    assert await statuses(house, ("/resume", {})) == [409]
    del second.answers[LOAD]
    status, said = await house.ask("POST", LOAD, {"weight_dir": "/step_1"})
    assert (status, said["succeeded"], said["done_before"]) == (200, 1, 1)
    assert paths_of(first) == [LOAD]
    assert paths_of(second) == [LOAD, LOAD]
    assert gates(house) == ["", ""]
    assert version(house) == 1
    assert await statuses(house, (LOAD, {"weight_dir": "/step_1"})) == [200]
    assert paths_of(first) == [LOAD, LOAD]  # it is another call by now
    assert version(house) == 2


async def test_a_call_in_which_ranks_meet_is_answered_so_that_nobody_repeats_it(
    house, first, second
) -> None:
    """TRL repeats 500, 502 and 503; prime-rl whatever is above."""
    second.answers[LOAD] = FAILS
    await statuses(house, (START, {}))
    status, said = await house.ask("POST", LOAD, CHUNK)
    assert (status, said["error"]["code"]) == (424, 424)
    assert "do not retry" in said["error"]["message"]
    assert await statuses(house, (LOAD, {"update_info": {"names": ["v"]}})) == [409]
    second.answers["/init_weight_transfer_engine"] = FAILS
    assert await statuses(house, ("/init_weight_transfer_engine", {})) == [424]


async def test_finishing_a_failed_load_leaves_weights_incomplete(house, first, second) -> None:
    """As TRL does, whose `finally` finishes; the next update begins anew."""
    second.answers[LOAD] = FAILS
    assert await statuses(house, (START, {}), (LOAD, CHUNK), (FINISH, {})) == [200, 424, 409]
    assert paths_of(first) == paths_of(second) == [START, LOAD, FINISH]
    assert all(gates(house))
    assert version(house) == 0
    del second.answers[LOAD]
    assert await statuses(house, (START, {}), (LOAD, CHUNK), (FINISH, {})) == [200] * 3
    assert gates(house) == ["", ""]
    assert version(house) == 1


@pytest.mark.parametrize(
    ("path", "answer", "status"),
    [
        (START, FAILS, 502),  # transfers are not configured
        (LOAD, (404, {"detail": "Not Found"}), 404),
        (LOAD, (422, {"detail": "a field is missing"}), 422),
        ("/areal_update_weights", (400, {"error": "a field is missing"}), 400),
    ],
)
async def test_an_update_refused_by_all_changes_nothing(
    path: str, answer: Any, status: int, house, first, second
) -> None:
    first.answers[path] = second.answers[path] = answer
    assert await statuses(house, (path, {})) == [status]
    assert gates(house) == ["", ""]
    assert version(house) == 0


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (LOAD, FAILS),
        ("/areal_update_weights", (400, {"success": False, "message": "TP rank: 0 failed"})),
    ],
)
async def test_a_failed_update_keeps_the_gates_closed(
    path: str, answer: Any, house, first, second
) -> None:
    first.answers[path] = second.answers[path] = answer
    assert (await statuses(house, (path, {})))[0] >= 400
    assert all(gates(house))
    first.answers.clear()
    second.answers.clear()
    assert await statuses(house, (path, {"another": 1})) == [200]
    assert gates(house) == ["", ""]
    assert version(house) == 1


async def test_a_removed_instance_does_not_block_an_update(house, first, second) -> None:
    second.answers[LOAD] = FAILS
    assert await statuses(house, (LOAD, {"weight_dir": "/1"})) == [502]
    await house.ask("POST", f"/remove_worker?url={B}")
    status, said = await house.ask("POST", LOAD, {"weight_dir": "/1"})
    assert (status, said["total"], said["done_before"]) == (200, 0, 1)
    assert paths_of(first) == [LOAD]
    assert house.driver.versions.gate(A) == ""
    assert version(house) == 1


async def test_an_instance_that_joins_late_has_no_part_in_the_update() -> None:
    first, second = two()
    async with House(first) as house:
        await statuses(house, (START, {}))
        await second.open()
        house.instances[B] = second
        assert (await house.ask("POST", "/workers", {"url": B}))[0] == 201
        assert await statuses(house, (LOAD, CHUNK), (FINISH, {})) == [200, 200]
        assert not second.asked
        assert house.driver.versions.version_of(A).version == 1
        assert house.driver.versions.version_of(B).version != 1


@pytest.mark.scene(live={"poll_s": 0.05})
async def test_an_instance_lost_during_an_update_has_no_part_in_it(house, first, second) -> None:
    await statuses(house, (START, {}))
    second.dead = True
    await until(lambda: not house.driver.supervisors[B].joined, 30)
    second.describes(started_at=2.0)
    second.dead = False
    await until(lambda: house.driver.supervisors[B].joined, 30)
    assert await statuses(house, (LOAD, CHUNK), (FINISH, {})) == [200, 200]
    assert paths_of(second) == [START]
    assert house.driver.versions.version_of(A).version == 1


async def newcomer(house: House) -> Upstream:
    """One whose weights are those of its start, at a fleet whose trainer has gone on."""
    late = Upstream(B)
    await late.open()
    house.instances[B] = late
    assert (await house.ask("POST", "/workers", {"url": B}))[0] in (201, 202)
    assert house.driver.supervisors[B].admission.awaits_weights
    return late


def says(instance: Upstream, version: int) -> None:
    instance.describes(version=version)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.scene(live={"poll_s": 0.05})
async def test_a_waiting_instance_gets_weights_that_come_in_one_call(fails: bool, house) -> None:
    """And holds nobody up who has joined."""
    await statuses(house, (LOAD, {"weight_dir": "/1"}))
    late = await newcomer(house)
    if fails:
        late.answers[LOAD] = FAILS
    status, said = await house.ask("POST", LOAD, {"weight_dir": "/2"})
    assert (status, [failure["url"] for failure in said["away"]]) == (200, [B] * fails)
    assert paths_of(late) == [LOAD]
    assert version(house) == 2
    assert gates(house) == ["", ""]
    assert (("version", 2) in late.calls) is not fails
    if not fails:
        says(late, 2)  # as it was labelled
        await until(lambda: house.driver.supervisors[B].joined, 30)
        assert house.driver.versions.version_of(B).version == 2


@pytest.mark.scene(live={"poll_s": 0.05})
async def test_a_waiting_instance_takes_part_in_its_transfer(house) -> None:
    set_up = "/init_weight_transfer_engine"
    info = {"init_info": {"rank_offset": 1}}
    update = [(START, {}), (LOAD, CHUNK), (FINISH, {})]
    assert await statuses(house, (set_up, info), *update) == [200] * 4
    late = await newcomer(house)
    assert await statuses(house, *update) == [200] * 3
    assert (await house.ask("GET", "/get_world_size"))[1]["total"] == 2
    assert not [
        path for path in paths_of(late) if path != "/get_world_size"
    ]  # it would refuse, or the ranks would not meet
    assert await statuses(house, (set_up, info), *update) == [200] * 4
    assert paths_of(late)[1:] == [set_up, START, LOAD, FINISH]
    assert msgspec.json.decode(late.asked[1]["body"])["init_info"]["rank_offset"] == 2
    says(late, 3)
    await until(lambda: house.driver.supervisors[B].joined, 30)
    assert version(house) == 3


async def test_an_unlabelled_instance_has_no_verified_version(house, first, second) -> None:
    def refuse(call: str) -> None:
        if call == "version":
            raise OSError("gone")

    second.obey = refuse
    assert await statuses(house, (LOAD, {"weight_dir": "/1"})) == [200]
    assert [house.driver.versions.version_of(name).version for name in (A, B)] == [1, 0]


async def test_the_trainer_may_say_which_version_it_is(house, first, second) -> None:
    await statuses(house, (START, {}))
    assert await statuses(house, (FINISH, {"weight_version": "17"})) == [200]
    assert version(house) == 17
    assert await statuses(house, ("/update_weight_version", {"new_version": "20"})) == [200]
    assert version(house) == 20
    assert await statuses(house, ("/update_weight_version", {"new_version": "20"})) == [200]


@pytest.mark.parametrize(
    ("label", "status"), [("step-17", 400), (17, 400), ("-1", 400), ("4", 409), ([], 400)]
)
@pytest.mark.scene(start_version=5)
async def test_a_label_is_the_number_of_a_version_and_versions_grow(
    label: object, status: int, house, first, second
) -> None:
    for path, field in ((FINISH, "weight_version"), ("/update_weight_version", "new_version")):
        told, said = await house.ask("POST", path, {field: label})
        assert (told, field in said["error"]["message"]) == (status, True)
    assert not first.asked
    assert version(house) == 5


async def test_weights_are_labelled_when_complete(house, first, second) -> None:
    await statuses(house, (START, {}))
    assert await statuses(house, ("/update_weight_version", {"new_version": "9"})) == [409]


async def test_while_we_load_weights_the_trainer_waits(house, first, second) -> None:
    loading = asyncio.Event()

    async def load(client: Any, version: int) -> None:
        await loading.wait()

    await house.service.gateway.trainer.weights.publish(1, load)
    await until(lambda: first.calls or second.calls)
    assert await statuses(house, (START, {})) == [409]
    loading.set()
    await until(lambda: house.service.gateway.trainer.weights.has_loaded(1), 30)
    assert house.driver.versions.version_of(A).driven_by == US
    assert await statuses(house, (START, {}), (FINISH, {})) == [200, 200]
    assert version(house) == 2


@pytest.mark.parametrize(
    ("path", "within", "world"),
    [
        ("/init_weight_transfer_engine", "init_info", "world_size"),
        ("/init_broadcaster", "", "inference_world_size"),
        ("/areal_init_weights_update_group", "", "world_size"),
    ],
)
async def test_each_instance_gets_its_own_ranks(path: str, within: str, world: str) -> None:
    first, second = two()
    first.workers, second.workers = 4, 2
    async with House(first, second) as house:
        info = {"rank_offset": 1, world: 7, "port": 1}
        assert await statuses(house, (path, {within: info} if within else info)) == [200]
        sent = [msgspec.json.decode(each.asked[0]["body"]) for each in (first, second)]
        own = [body[within] if within else body for body in sent]
        assert [(one["rank_offset"], one[world]) for one in own] == [(1, 7), (5, 7)]
        status, said = await house.ask(
            "POST", path, {within: {**info, world: 5}} if within else {**info, world: 5}
        )
        assert (status, "it must be 7" in said["error"]["message"]) == (400, True)
        assert len(first.asked) == 1


@pytest.mark.parametrize("body", [b"[]", b"\xff", b"{", b"[" * 100_000])
async def test_a_set_up_that_is_no_object_is_refused(body: bytes, house, first, second) -> None:
    url = "/init_weight_transfer_engine"
    async with house.session.post(url, data=body) as response:
        assert response.status == 400
        assert "not a JSON object" in (await response.json())["error"]["message"]


class Through:
    """A trainer that sees one server, the gateway."""

    def __init__(self, service: Service, session: aiohttp.ClientSession) -> None:
        self.service = service
        self._session = session
        self._url = service.url

    async def post(self, path: str, body: Any = None) -> Any:
        async with self._session.post(f"{self._url}{path}", json=body or {}) as response:
            said = await response.json()
            assert response.status == 200, said
            return said

    async def get(self, path: str) -> Any:
        async with self._session.get(f"{self._url}{path}") as response:
            assert response.status == 200
            return await response.json()

    async def generate(self, prompt: list[int], tokens: int) -> Any:
        sampling = {"ignore_eos": True, "temperature": 0, "max_tokens": tokens}
        body = {"token_ids": prompt, "sampling_params": sampling}
        return await self.post("/inference/v1/generate", body)


async def vllm(trainer: Through, folder: Path) -> None:
    world = (await trainer.get("/get_world_size"))["world_size"]
    ranks = {"rank_offset": 1, "world_size": world + 1}
    info = {"master_address": uuid4().hex, "master_port": 1, **ranks}
    await trainer.post("/init_weight_transfer_engine", {"init_info": info})
    await trainer.post("/pause?mode=keep&clear_cache=false")
    await trainer.post(START)
    for _ in range(2):
        await trainer.post(LOAD, CHUNK)
    await trainer.post(FINISH)
    await trainer.post("/reset_prefix_cache?reset_running_requests=true")
    await trainer.post("/resume")


async def prime(trainer: Through, folder: Path) -> None:
    world = (await trainer.get("/get_world_size"))["world_size"]
    group = {"host": uuid4().hex, "port": 1, "rank_offset": 0, "inference_world_size": world}
    await trainer.post("/init_broadcaster", group)
    await trainer.post("/pause?mode=keep&clear_cache=false")
    await trainer.post(LOAD, {"weight_dir": str(folder)})
    await trainer.post("/resume")


async def skyrl(trainer: Through, folder: Path) -> None:
    await trainer.post("/init_weight_transfer_engine", {"init_info": {}})
    await trainer.post("/pause?mode=keep&clear_cache=false")
    for method in (
        "skyrl_start_weight_update",
        "update_weights_nccl",
        "skyrl_finish_weight_update",
    ):
        await trainer.post("/collective_rpc", {"method": method})
    await trainer.post("/resume")


async def areal(trainer: Through, folder: Path) -> None:
    world = (await trainer.get("/get_world_size"))["world_size"]
    group = {"master_address": uuid4().hex, "master_port": "1", "backend": "nccl"}
    ranks = {"rank_offset": 1, "world_size": world + 1, "group_name": "g"}
    await trainer.post("/areal_init_weights_update_group", {**group, **ranks})
    await trainer.post("/areal_pause_generation")
    meta = {"names": [], "dtypes": [], "shapes": [], "group_name": "g"}
    await trainer.post("/areal_set_update_weight_meta", meta)
    await trainer.post("/areal_update_weights_xccl")
    await trainer.post("/areal_continue_generation")


async def areal_from_disk(trainer: Through, folder: Path) -> None:
    await trainer.post("/areal_pause_generation")
    await trainer.post("/areal_update_weights", {"model_path": str(folder)})
    await trainer.post("/areal_continue_generation")


@pytest.mark.parametrize("update", [vllm, prime, skyrl, areal, areal_from_disk])
async def test_a_trainer_s_update_under_way_in_the_middle_of_answers(
    update: Callable[[Through, Path], Any], tmp_path: Path
) -> None:
    """Every token's version is that of the server's span; NCCL's ranks would have met."""
    settings: Any = {"world_size": 2, "speed": 200.0}  # three seconds, undisturbed
    async with fleet(tmp_path, **settings) as (service, servers), aiohttp.ClientSession() as http:
        trainer = Through(service, http)
        asking = [asyncio.create_task(trainer.generate([n + 1], 600)) for n in range(8)]
        await asyncio.gather(*(server.until_generated(40) for server in servers))
        for step in (1, 2):
            await update(trainer, tmp_path)
            assert service.live.driver.view.run.version == step
            for server in servers:
                assert (await server.get("/weight_info"))[1] == {"weight_version": str(step)}
        late = await trainer.generate([77], 5)
        assert [s["version"] for s in late["rollout_sched"]["segments"]] == [2]
        ends = set()
        for answer in await asyncio.gather(*asking):
            segments = answer["rollout_sched"]["segments"]
            assert (segments[0]["version"], segments[-1]["end"]) == (0, 600)
            ends.add(segments[-1]["version"])
            spans = answer["choices"][0].get("weight_versions")
            if spans is not None:  # it was one attempt
                ours = [(str(s["version"]), s["start"], s["end"]) for s in segments]
                assert ours == [(s["version"], s["start"], s["end"]) for s in spans]
        assert ends & {1, 2}
        assert not service.live.driver.view.anomalies
        assert not service.live.driver.pump.scheduler.parts.requests


async def test_calls_during_a_load_wait_for_its_end(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (service, servers), aiohttp.ClientSession() as http:
        trainer = Through(service, http)
        await trainer.post("/init_weight_transfer_engine", {"init_info": {}})
        await trainer.post(START)  # without a pause: nothing runs
        asking = asyncio.create_task(trainer.generate([1], 5))
        await until(lambda: service.live.driver.view.waiting == 1, 30)
        await trainer.post(LOAD, CHUNK)
        assert [(await server.get("/load"))[1]["server_load"] for server in servers] == [0, 0]
        await trainer.post(FINISH)
        answer = await asking
        assert [s["version"] for s in answer["rollout_sched"]["segments"]] == [1]
