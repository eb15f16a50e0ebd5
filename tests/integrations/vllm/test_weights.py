"""WeightLoaders: the calls they make, in order, and what they check before the first."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.vllm import weights
from rollout_sched.integrations.vllm.weights import ReloadFromDisk, WeightTransfer
from rollout_sched.live.ports import InstanceError
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
        asyncio.run(loader(client, version))
    return client.calls


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
    asyncio.run(loader.check(7))
    with pytest.raises(CallerError, match="v8: no such folder"):
        asyncio.run(loader.check(8))
    client = Recorder()
    with pytest.raises(CallerError, match="v8: no such folder"):
        apply(loader, 8, client=client)
    assert client.calls == []


def test_a_path_that_only_instances_see_is_not_checked():
    loader = ReloadFromDisk("/only/there/{version}", visible_here=False)
    assert apply(loader, 8) == [("reload_weights", {"weights_path": "/only/there/8"})]


def test_a_checkpoint_is_looked_at_once_for_all_instances(checkpoint, monkeypatch):
    looked = []
    monkeypatch.setattr(weights, "check_checkpoint", looked.append)
    loader = ReloadFromDisk(checkpoint)

    async def publish():
        await loader.check(7)
        for _ in range(3):
            await loader(Recorder(), 7)

    asyncio.run(publish())
    assert looked == [checkpoint]
    monkeypatch.setattr(weights, "GOOD_FOR_S", 0.0)
    asyncio.run(loader(Recorder(), 7))  # one that joins long after
    assert looked == [checkpoint] * 2


def test_a_disk_that_does_not_answer_is_given_up(checkpoint, monkeypatch):
    hanging = threading.Event()
    monkeypatch.setattr(weights, "check_checkpoint", lambda folder: hanging.wait(20))
    client = Recorder()
    loader = ReloadFromDisk(checkpoint, check_limit_s=0.05)
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
        asyncio.run(ReloadFromDisk(template).check(1))


def test_a_transfer_begins_once_and_goes_through_its_steps():
    loader = WeightTransfer({"path": "p"}, {"port": 1})
    update = [
        ("start_weight_update", {}),
        ("update_weights", {"update_info": {"path": "p"}}),
        ("finish_weight_update", {}),
    ]
    init = ("init_weight_transfer_engine", {"init_info": {"port": 1}})
    assert apply(loader, 1, 2) == [init, *update, *update]


def test_a_restarted_instance_is_initialized_anew():
    client = Recorder()
    loader = WeightTransfer({})
    apply(loader, 1, client=client)
    client.started_at = 2.0
    apply(loader, 2, client=client)
    inits = [what for what, _ in client.calls if what.startswith("init")]
    assert len(inits) == 2


def test_infos_may_be_made_for_each_instance_and_version():
    async def update(client, version):
        return [{"bucket": i, "version": version} for i in range(2)]

    loader = WeightTransfer(update, lambda client, version: {"name": client.name})
    bodies = [body for _, body in apply(loader, 5)]
    assert bodies == [
        {"init_info": {"name": "i0"}},
        {},
        {"update_info": {"bucket": 0, "version": 5}},
        {"update_info": {"bucket": 1, "version": 5}},
        {},
    ]


def test_a_failed_step_ends_the_update_and_a_failed_init_is_made_up_for():
    client = Recorder(fails="init_weight_transfer_engine")
    loader = WeightTransfer({})
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

    def test_each_instance_gets_its_own(self):
        clients = [Recorder(workers=2), Recorder(workers=1)]
        loader = WeightTransfer({}, RANKS, fleet=lambda: clients)

        async def scene():
            await asyncio.gather(*(loader(client, 1) for client in clients))

        asyncio.run(scene())
        assert self.offsets(clients) == [1, 3]

    def test_a_group_of_another_size_is_refused_before_anybody_waits_in_it(self):
        clients = [Recorder(), Recorder()]
        loader = WeightTransfer({}, RANKS, fleet=lambda: clients)
        with pytest.raises(CallerError, match="it must be 3"):
            apply(loader, 1, client=clients[0])
        assert not clients[0].calls

    def test_who_came_later_or_was_restarted_has_no_part_in_the_group(self):
        clients = [Recorder(workers=3)]
        loader = WeightTransfer({}, RANKS, fleet=lambda: clients)
        late = Recorder()

        async def scene():
            await loader(clients[0], 1)
            with pytest.raises(InstanceError, match="another init_info"):
                await loader(late, 1)
            clients[0].started_at = 2.0
            with pytest.raises(InstanceError, match="another init_info"):
                await loader(clients[0], 1)

        asyncio.run(scene())
        assert not late.calls

    @pytest.mark.parametrize("info", [{"port": 1}, lambda client, version: {"rank_offset": 7}])
    def test_what_names_no_rank_or_is_made_for_each_is_left_as_it_is(self, info):
        client = Recorder()
        loader = WeightTransfer({}, info, fleet=lambda: [client])
        apply(loader, 1, client=client)
        told = {"rank_offset": 7} if callable(info) else info
        assert client.calls[0] == ("init_weight_transfer_engine", {"init_info": told})
