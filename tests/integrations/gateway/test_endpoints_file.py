"""A file that names instances: what is written there is followed, and what is no use changes
nothing."""

from __future__ import annotations

import asyncio
import builtins
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway import endpoints_file
from rollout_sched.integrations.gateway.endpoints_file import (
    Endpoint,
    EndpointsFile,
    read_endpoints,
)
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.kubernetes.mount import Mount
from tests.live.scripted import until

YAML = """
endpoints:
- name: one
  address: 10.0.0.7
  port: 8000
  labels: {role: decode}
- {address: "fd00::1", port: "8001", anything: else}
"""


def write(path: Path, *ports: int) -> None:
    """Replaced as a whole, as those do who write such files."""
    new = path.with_suffix(".new")
    new.write_text(listed(*ports))
    new.replace(path)


class TestReading:
    def test_yaml(self, tmp_path: Path) -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text(YAML)
        urls = [endpoint.url for endpoint in read_endpoints(path)]
        assert urls == ["http://10.0.0.7:8000", "http://[fd00::1]:8001"]

    def test_json(self, tmp_path: Path) -> None:
        path = tmp_path / "endpoints.json"
        write(path, 1, 2)
        assert [endpoint.url for endpoint in read_endpoints(path)] == ["http://a:1", "http://a:2"]

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("{", "endpoints.json"),
            ("[]", "object"),
            ("{}", "endpoints"),
            ('{"endpoints": [{"address": "a"}]}', "port"),
            ('{"endpoints": [{"address": "a", "port": 0}]}', r"endpoints\[0\]\.port"),
            ('{"endpoints": [{"address": "", "port": 1}]}', "address"),
            (
                '{"endpoints": [{"address": "a", "port": 1}, {"address": "A", "port": 1}]}',
                r"http://A:1 is listed twice, endpoints\[0\] and endpoints\[1\]; remove one",
            ),
            ('{"endpoints": {"address": "a", "port": 1}}', "array"),
            ('{"endpoints": [{"address": "a", "port": true}]}', r"endpoints\[0\]\.port"),
            ('{"endpoints": [{"address": 7, "port": 1}]}', r"endpoints\[0\]\.address"),
            (
                '{"endpoints": [{"address": "a:1", "port": 1}]}',
                r"\[0\]: address 'a:1' .* in the field `port`",
            ),
            ('{"endpoints": [{"address": "http://a", "port": 1}]}', "write it without http://"),
            ('{"endpoints": [{"address": "a b", "port": 1}]}', "not a host name or IP"),
            ('{"since": ' + "[" * 100_000, "RecursionError"),
            ('{"endpoints": [{"address": "a", "po', "truncated"),
        ],
    )
    def test_unusable_files_are_refused(self, text: str, says: str, tmp_path: Path) -> None:
        path = tmp_path / "endpoints.json"
        path.write_text(text)
        with pytest.raises(CallerError, match=says):
            read_endpoints(path)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("endpoints:", "array"),
            ("endpoints:\n- {address: a, po", "flow mapping"),
            ("endpoints: []\n---\nendpoints: []", "single document"),
            ("endpoints: [{address: a, port: !!bool x}]", "KeyError"),
            ("since: 2026-13-45\nendpoints: []", "month must be"),
            ("endpoints: [{address: 10, port: 1}]", r"endpoints\[0\]\.address"),
        ],
    )
    def test_unusable_yaml_is_refused(self, text: str, says: str, tmp_path: Path) -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text(text)
        with pytest.raises(CallerError, match=says) as told:
            read_endpoints(path)
        assert str(told.value).startswith(f"{path}: ")
        assert str(told.value).endswith(
            "the file needs `endpoints:` and a list of {address, port}, see docs/gateway.md"
        )
        assert "\n" not in str(told.value)

    @pytest.mark.parametrize("opens", ["[", "- ", "? ", "{a: "])
    def test_yaml_that_is_nested_too_deep_does_not_crash(self, opens: str, tmp_path: Path) -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text(opens * 50_000)
        with pytest.raises(CallerError, match=r"nested deeper than 64|maximum nesting depth"):
            read_endpoints(path)

    def test_yaml_that_is_too_long_is_refused_before_it_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text("endpoints: []\n" + "#" * 256 * 1024)
        with pytest.raises(CallerError, match="write JSON to a file"):
            read_endpoints(path)

    def test_a_value_that_takes_the_reader_of_yaml_long_is_refused(self, tmp_path: Path) -> None:
        """A number to the base of 60."""
        path = tmp_path / "endpoints.yaml"
        path.write_text("endpoints: " + "8:" * 1000 + "8")
        with pytest.raises(CallerError, match="a value has 2,001 characters, the limit is 1,000"):
            read_endpoints(path)

    def test_unread_fields_may_have_any_type(self, tmp_path: Path) -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text("endpoints: [{name: 7, address: a, port: 1, labels: [on], gpu: {}}]\nv: 2")
        assert [endpoint.url for endpoint in read_endpoints(path)] == ["http://a:1"]

    def test_a_missing_file_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(CallerError, match="No such file"):
            read_endpoints(tmp_path / "endpoints.yaml")

    def test_without_a_reader_of_yaml_it_says_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def missing(*_: Any, **__: Any) -> Any:
            raise ImportError("yaml")

        monkeypatch.setattr(msgspec.yaml, "decode", missing)
        path = tmp_path / "endpoints.yaml"
        path.write_text(YAML)
        with pytest.raises(CallerError, match=r"pip install .*\[endpoints\]"):
            read_endpoints(path)


async def test_a_gateway_follows_it(path: Path) -> None:
    one, two = Upstream("http://a:1"), Upstream("http://a:2")
    async with House(one, two, instances=[], endpoints=path) as house:
        assert sorted(house.service.live.driver.supervisors) == ["http://a:1", "http://a:2"]
        write(path, 2)
        supervisors = house.service.live.driver.supervisors
        await until(lambda: list(supervisors) == ["http://a:2"], 20)


class Looks:
    """Stands for the path of a file: each look finds the next text, and then always the last."""

    suffix = ".json"

    def __init__(self, *texts: str) -> None:
        self.texts = [text.encode() for text in texts]
        self.reads = 0

    def __str__(self) -> str:
        return "endpoints.json"

    def read_bytes(self) -> bytes:
        self.reads += 1
        return self.texts[min(self.reads, len(self.texts)) - 1]


def listed(*ports: int) -> str:
    return json.dumps({"endpoints": [{"address": "a", "port": port} for port in ports]})


class Fleet:
    """Those that were added and not removed; `changes` in their order."""

    def __init__(self, path: Any) -> None:
        self.here: builtins.set[str] = set()
        self.changes: list[str] = []
        self.refused: builtins.set[str] = set()
        self.removing: asyncio.Event | None = None
        self.file = EndpointsFile(path, self.add, self.remove, poll_s=0.001)

    async def __aenter__(self) -> Fleet:
        await self.file.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.file.close()

    async def add(self, endpoint: Endpoint) -> None:
        url = endpoint.url
        self.changes.append(f"+{url}")
        if url in self.refused:
            raise CallerError("it is here already")
        self.here.add(url)

    async def remove(self, url: str) -> None:
        if self.removing is not None:
            await self.removing.wait()
        self.changes.append(f"-{url}")
        self.here.discard(url)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "endpoints.json", 1, 2)
    return tmp_path / "endpoints.json"


@pytest.fixture
@asynccontextmanager
async def fleet(path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(path) as opened:
        yield opened


class TestWatching:
    async def test_listed_instances_join_and_others_leave(self, path: Path, fleet: Fleet) -> None:
        assert fleet.here == {"http://a:1", "http://a:2"}
        write(path, 2, 3)
        await until(lambda: fleet.here == {"http://a:2", "http://a:3"})
        write(path)
        await until(lambda: not fleet.here)

    async def test_an_unreadable_file_changes_nothing_and_is_logged_once(
        self, path: Path, fleet: Fleet, caplog: pytest.LogCaptureFixture
    ) -> None:
        path.write_text("half a fi")
        await until(lambda: caplog.records)
        await asyncio.sleep(0.05)
        path.unlink()
        await until(lambda: len(caplog.records) > 1)
        assert len(fleet.here) == 2
        write(path, 1)
        await until(lambda: len(fleet.here) == 1)
        assert sum("half" in r.message or "malformed" in r.message for r in caplog.records) <= 1

    async def test_a_config_map_that_changes_is_followed(self, tmp_path: Path) -> None:
        mount = Mount(tmp_path / "mount", **{"endpoints.json": listed(1, 2)})
        fleet = Fleet(tmp_path / "mount/endpoints.json")
        await fleet.file.open()
        assert fleet.here == {"http://a:1", "http://a:2"}
        mount.update(**{"endpoints.json": listed(2, 3)})
        await until(lambda: fleet.here == {"http://a:2", "http://a:3"})
        mount.update(**{"endpoints.json": listed(3)})
        await until(lambda: fleet.here == {"http://a:3"})
        await fleet.file.close()

    async def test_a_truncated_list_is_not_followed(self) -> None:
        """Who writes into the file itself leaves a whole list that is too short, for a moment."""
        before, half, whole = listed(1, 2), listed(1), listed(1, 2, 3)
        looks = Looks(before, before, half, whole, half, whole, whole)
        async with Fleet(looks) as fleet:
            await until(lambda: len(fleet.here) == 3)
            assert not [change for change in fleet.changes if change.startswith("-")]

    async def test_a_half_written_file_is_not_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        looks = Looks(listed(1), "", listed(1)[:9], listed(1, 2))
        async with Fleet(looks) as fleet:
            await until(lambda: len(fleet.here) == 2)
        assert not caplog.records

    @pytest.mark.real_time
    async def test_a_hanging_disk_does_not_block_the_loop(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(endpoints_file, "READ_S", 0.01)
        answers = threading.Event()

        class Hung(Looks):
            def read_bytes(self) -> bytes:
                if self.reads == 1:
                    answers.wait(20)
                return super().read_bytes()

        fleet = Fleet(Hung(listed(1), listed(1, 2)))
        await fleet.file.open()
        await until(lambda: caplog.records)
        assert fleet.here == {"http://a:1"}
        answers.set()
        await until(lambda: len(fleet.here) == 2)
        await fleet.file.close()
        assert "not read within 0.01 s" in caplog.text

    async def test_a_relisted_instance_waits_until_it_has_left(
        self, path: Path, fleet: Fleet
    ) -> None:
        fleet.removing = asyncio.Event()
        write(path, 1)
        await asyncio.sleep(0.05)
        write(path, 1, 2)
        await asyncio.sleep(0.05)
        assert fleet.changes[2:] == []
        fleet.removing.set()
        await until(lambda: len(fleet.changes) == 4)
        assert fleet.changes[2:] == ["-http://a:2", "+http://a:2"]

    async def test_a_refused_instance_does_not_block_others(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        fleet = Fleet(path)
        fleet.refused = {"http://a:1"}
        async with fleet:
            assert fleet.here == {"http://a:2"}
        assert "here already" in caplog.text

    async def test_an_instance_added_by_another_is_kept(self, path: Path) -> None:
        fleet = Fleet(path)
        fleet.refused = {"http://a:1"}
        async with fleet:
            write(path, 3)
            await until(lambda: fleet.here == {"http://a:3"})
            assert "-http://a:1" not in fleet.changes

    async def test_an_unusable_file_at_start_is_the_callers_fault(self, path: Path) -> None:
        path.write_text("{}")
        with pytest.raises(CallerError):
            await Fleet(path).file.open()
