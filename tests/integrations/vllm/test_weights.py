"""WeightLoaders: the calls they make, in order, and what they check before the first."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm import weights
from rollout_sched.integrations.vllm.weights import (
    VLLM,
    OutsideRoots,
    RankFields,
    ReloadFromDisk,
    WeightRoots,
    WeightTransfer,
    deal,
)
from rollout_sched.live.ports import InstanceError
from tests import virtual_net
from tests.integrations.vllm.test_checkpoint import safetensors


class Recorder:
    """A client that keeps what it is asked to do."""

    name = "i0"

    def __init__(self, fails="", workers=1):
        self.started_at = 1.0
        self.workers = workers
        self.calls = []
        self._fails = fails

    async def collective_rpc(self, method, kwargs, limit_s=None):
        self._note(method, kwargs)

    async def weight_transfer(self, step, body, limit_s=None):
        self._note(step, body)

    async def world_size(self):
        return self.workers

    def _note(self, what, body):
        self.calls.append((what, body))
        if what == self._fails:
            raise InstanceError(f"{what} answered 500")


def apply(loader, *versions, client=None):
    client = client or Recorder()
    for version in versions:
        virtual_net.run(loader(client, version))
    return client.calls


def transfer(init_info, update_info=None, clients=()):
    return WeightTransfer(lambda version: update_info or {}, init_info, lambda: clients)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "v7"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(safetensors())
    return folder


def test_a_reload_names_the_versions_folder(tmp_path, checkpoint):
    calls = [("reload_weights", {"weights_path": str(checkpoint)})]
    assert apply(ReloadFromDisk(f"{tmp_path}/v{{version}}"), 7) == calls
    assert apply(ReloadFromDisk(lambda version: tmp_path / f"v{version}"), 7) == calls


def test_a_bad_path_reaches_no_instance(tmp_path, checkpoint):
    loader = ReloadFromDisk(f"{tmp_path}/v{{version}}")
    virtual_net.run(loader.check(7))
    with pytest.raises(CallerError, match="v8: no such folder"):
        virtual_net.run(loader.check(8))
    client = Recorder()
    with pytest.raises(CallerError, match="v8: no such folder"):
        apply(loader, 8, client=client)
    assert client.calls == []


def test_a_path_that_only_instances_see_is_not_checked():
    loader = ReloadFromDisk("/only/there/{version}", visible_here=False)
    assert apply(loader, 8) == [("reload_weights", {"weights_path": "/only/there/8"})]


@pytest.mark.real_time
async def test_a_checkpoint_is_looked_at_once_for_all_instances(checkpoint, monkeypatch):
    looked = []
    monkeypatch.setattr(weights, "check_checkpoint", looked.append)
    loader = ReloadFromDisk(checkpoint)
    await loader.check(7)
    for _ in range(3):
        await loader(Recorder(), 7)
    assert looked == [checkpoint]
    monkeypatch.setattr(weights, "GOOD_FOR_S", 0.0)
    await loader(Recorder(), 7)  # one that joins long after
    assert looked == [checkpoint] * 2


def test_a_disk_that_does_not_answer_is_given_up(checkpoint, monkeypatch):
    hanging = threading.Event()
    monkeypatch.setattr(weights, "check_checkpoint", lambda folder: hanging.wait(20))
    client = Recorder()
    monkeypatch.setattr(weights, "CHECK_LIMIT_S", 0.05)
    loader = ReloadFromDisk(checkpoint)
    with pytest.raises(CallerError, match=r"not checked within 0\.05 s.*visible_here"):
        asyncio.run(loader(client, 7))
    hanging.set()
    assert client.calls == []


@pytest.mark.parametrize(
    "template",
    [
        "/w/{step}",
        "/w/{}",
        "/w/{version",
        "/w/{version:>200000000}",
        "/w/{version.__class__}",
        "/w/{{version}}",
        "/w/{version!r}",
    ],
)
def test_a_template_with_other_braces(template):
    with pytest.raises(CallerError, match="braces"):
        virtual_net.run(ReloadFromDisk(template).check(1))


def test_a_transfer_begins_once_and_goes_through_its_steps():
    loader = transfer({"port": 1}, {"path": "p"})
    update = [
        ("start_weight_update", {}),
        ("update_weights", {"update_info": {"path": "p"}}),
        ("finish_weight_update", {}),
    ]
    init = ("init_weight_transfer_engine", {"init_info": {"port": 1}})
    assert apply(loader, 1, 2) == [init, *update, *update]


def test_a_drafter_is_updated_after_the_model():
    drafts = {1: {"path": "d1"}, 2: None}
    loader = WeightTransfer(lambda version: {"path": "p"}, {}, list, drafts.get)
    steps = [what for what, _ in apply(loader, 1, 2)]
    update = ["start_weight_update", "update_weights", "finish_weight_update"]
    assert steps == [
        "init_weight_transfer_engine",
        *update,
        *["start_draft_weight_update", "update_weights", "finish_weight_update"],
        *update,
    ]


def test_a_restarted_instance_is_initialized_anew():
    client = Recorder()
    loader = transfer({})
    apply(loader, 1, client=client)
    client.started_at = 2.0
    apply(loader, 2, client=client)
    inits = [what for what, _ in client.calls if what.startswith("init")]
    assert len(inits) == 2


def test_a_list_of_infos_makes_an_update_call_for_each():
    def update(version):
        return [{"bucket": i, "version": version} for i in range(2)]

    bodies = [body for _, body in apply(WeightTransfer(update, {}, list), 5)]
    assert bodies == [
        {"init_info": {}},
        {},
        {"update_info": {"bucket": 0, "version": 5}},
        {"update_info": {"bucket": 1, "version": 5}},
        {},
    ]


def test_a_failed_step_ends_the_update_and_a_failed_init_is_made_up_for():
    client = Recorder(fails="init_weight_transfer_engine")
    loader = transfer({})
    for _ in range(2):
        with pytest.raises(InstanceError, match="500"):
            apply(loader, 1, client=client)
    assert [what for what, _ in client.calls] == ["init_weight_transfer_engine"] * 2


def test_a_client_without_workers():
    class Other:
        name = "i1"

    with pytest.raises(CallerError, match="i1: Other cannot load weights"):
        apply(ReloadFromDisk("/w", visible_here=False), 1, client=Other())


RANKS = {"master_address": "t", "master_port": 1, "rank_offset": 1, "world_size": 4}


class TestRanks:
    def offsets(self, clients):
        return [body["init_info"]["rank_offset"] for c in clients for step, body in c.calls[:1]]

    async def test_each_instance_gets_its_own(self):
        clients = [Recorder(workers=2), Recorder(workers=1)]
        loader = transfer(RANKS, clients=clients)
        await asyncio.gather(*(loader(client, 1) for client in clients))
        assert self.offsets(clients) == [1, 3]

    def test_a_group_of_another_size_is_refused_before_anybody_waits_in_it(self):
        clients = [Recorder(), Recorder()]
        loader = transfer(RANKS, clients=clients)
        with pytest.raises(CallerError, match="it must be 3"):
            apply(loader, 1, client=clients[0])
        assert not clients[0].calls

    async def test_late_and_restarted_instances_have_no_part_in_the_group(self):
        clients = [Recorder(workers=3)]
        loader = transfer(RANKS, clients=clients)
        late = Recorder()
        await loader(clients[0], 1)
        with pytest.raises(InstanceError, match="another init_info"):
            await loader(late, 1)
        clients[0].started_at = 2.0
        with pytest.raises(InstanceError, match="another init_info"):
            await loader(clients[0], 1)
        assert not late.calls

    def test_an_info_without_ranks_stays_unchanged(self):
        client = Recorder()
        apply(transfer({"port": 1}, clients=[client]), 1, client=client)
        assert client.calls[0] == ("init_weight_transfer_engine", {"init_info": {"port": 1}})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "ckpt" / "v1").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    return tmp_path / "ckpt"


def test_without_roots_everything_passes() -> None:
    roots = WeightRoots()
    assert not roots.known
    for path in ("relative", "/anywhere", "s3://bucket/x", "\0"):
        roots.resolve(path)


def test_paths_within_the_roots_pass(root: Path) -> None:
    roots = WeightRoots([root])
    for path in (root, root / "v1", root / "not_yet" / "there", f"{root}/v1/../v2", f"{root}//v1"):
        roots.resolve(path)


@pytest.mark.parametrize(
    "path",
    ["{up}/other", "{root}-2", "{root}/../other", "{root}/v1/../../other", "/", "/etc/passwd"],
)
def test_paths_outside_the_roots_are_refused(root: Path, path: str) -> None:
    named = path.format(root=root, up=root.parent)
    with pytest.raises(OutsideRoots, match="--weights-root") as raised:
        WeightRoots([root]).resolve(named)
    assert str(root) in str(raised.value)
    assert repr(named) in str(raised.value)


@pytest.mark.parametrize(
    "path", ["v1", "org/model", "", "~/x", "file:///ckpt", "s3://x/y", "./v1", "/ckpt\0/x"]
)
def test_remote_paths_are_refused(root: Path, path: str) -> None:
    with pytest.raises(OutsideRoots):
        WeightRoots([root]).resolve(path)


def test_links_are_followed(root: Path) -> None:
    outside = root.parent / "other"
    (root / "latest").symlink_to(root / "v1")
    (root / "away").symlink_to(outside)
    (outside / "back").symlink_to(root / "v1")
    (root / "loop").symlink_to(root / "loop")
    roots = WeightRoots([root])
    assert roots.resolve(root / "latest") == root / "v1"
    assert roots.resolve(outside / "back") == root / "v1"
    with pytest.raises(OutsideRoots, match=f"leads to {outside}"):
        roots.resolve(root / "away" / "v1")
    roots.resolve(root / "loop")  # leads nowhere, so not outside


def test_a_root_may_be_a_link_and_there_may_be_several(root: Path) -> None:
    (root.parent / "link").symlink_to(root)
    roots = WeightRoots([root.parent / "link", root.parent / "other"])
    as_given = root.parent / "link" / "v1"
    assert roots.resolve(root / "v1") == roots.resolve(as_given) == as_given
    assert roots.resolve(root.parent / "other") == root.parent / "other"
    with pytest.raises(CallerError):
        roots.resolve(root.parent)


def test_files_within_a_folder_are_checked(root: Path) -> None:
    secret = root.parent / "other" / "secret.safetensors"
    secret.write_bytes(b"")
    (root / "v1" / "sound.safetensors").write_bytes(b"")
    roots = WeightRoots([root])
    roots.resolve(root / "v1")
    roots.resolve(root / "nowhere")  # only the instances may see it
    (root / "v1" / "model.safetensors").symlink_to(secret)
    with pytest.raises(OutsideRoots, match=r"model\.safetensors"):
        roots.resolve(root / "v1")


PRIME = RankFields("rank_offset", "inference_world_size")
WITHIN = RankFields("rank_offset", "world_size", within="init_info")


@given(st.integers(0, 4), st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_every_rank_of_the_group_is_dealt_once(first: int, sizes: list[int]) -> None:
    world = first + sum(sizes)
    info = {"rank_offset": first, "world_size": world, "packed": True}
    dealt = deal(info, VLLM, sizes)
    ranks = [
        rank
        for own, size in zip(dealt, sizes, strict=True)
        for rank in range(own["rank_offset"], own["rank_offset"] + size)
    ]
    assert ranks == list(range(first, world))
    assert all(own["world_size"] == world and own["packed"] for own in dealt)


def test_a_size_that_is_not_said_is_filled_in() -> None:
    assert deal({"rank_offset": 1}, VLLM, [2, 1]) == [
        {"rank_offset": 1, "world_size": 4},
        {"rank_offset": 3, "world_size": 4},
    ]


def test_prime_s_trainer_is_not_counted() -> None:
    info = {"host": "h", "rank_offset": 0, "inference_world_size": 3}
    assert [own["rank_offset"] for own in deal(info, PRIME, [1, 2])] == [0, 1]


def test_fields_within_another() -> None:
    info = {"init_info": {"rank_offset": 1, "world_size": 3}, "other": 1}
    dealt = deal(info, WITHIN, [1, 1])
    assert [own["init_info"]["rank_offset"] for own in dealt] == [1, 2]
    assert all(own["other"] == 1 for own in dealt)


@pytest.mark.parametrize("info", [{}, {"path": "x"}, {"init_info": {}}, {"init_info": 7}])
@pytest.mark.parametrize("fields", [VLLM, WITHIN])
def test_infos_without_ranks_stay_unchanged(info: dict[str, Any], fields: RankFields) -> None:
    assert deal(info, fields, [1, 2]) == [info, info]


@pytest.mark.parametrize("world", [2, 4])
def test_a_group_of_another_size_would_hang(world: int) -> None:
    with pytest.raises(CallerError, match=r"it must be 3: call GET /get_world_size"):
        deal({"rank_offset": 1, "world_size": world}, VLLM, [1, 1])


@pytest.mark.parametrize("value", [-1, True, "1", 1.0, None, 2**40])
def test_a_rank_is_a_number(value: object) -> None:
    with pytest.raises(CallerError, match="rank_offset must be a number"):
        deal({"rank_offset": value, "world_size": 3}, VLLM, [1, 1])
