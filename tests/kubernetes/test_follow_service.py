"""The script that writes an endpoints file from a Service."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest

from rollout_sched.integrations.gateway.endpoints_file import read_endpoints
from tests.kubernetes.manifests import FOLDER


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location(
        "follow_service", FOLDER / "elastic/follow_service.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def urls(path: Path) -> list[str]:
    return [endpoint.url for endpoint in read_endpoints(path)]


def test_a_name_becomes_its_addresses(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    script.look("127.0.0.1", 8000, path)
    assert urls(path) == ["http://127.0.0.1:8000"]


class Dns:
    """Answers with these addresses, or not at all."""

    def __init__(self) -> None:
        self.addresses: list[str] | None = None

    def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        if self.addresses is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(2, 1, 6, "", (address, port)) for address in self.addresses]


def test_nobody_is_dropped_for_a_name_server_that_is_away(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dns, path = Dns(), tmp_path / "endpoints.yaml"
    monkeypatch.setattr(socket, "getaddrinfo", dns.getaddrinfo)
    script.look("vllm", 8000, path)
    assert urls(path) == [], "the gateway starts with a file"
    assert "vllm: [Errno -3]" in capsys.readouterr().err
    dns.addresses = ["10.0.0.8", "10.0.0.7", "10.0.0.7", "fd00::1"]
    script.look("vllm", 8000, path)
    here = ["http://10.0.0.7:8000", "http://10.0.0.8:8000", "http://[fd00::1]:8000"]
    assert urls(path) == here
    for nothing in (None, []):
        dns.addresses = nothing
        script.look("vllm", 8000, path)
        assert urls(path) == here
    dns.addresses = ["10.0.0.9"]
    script.look("vllm", 8000, path)
    assert urls(path) == ["http://10.0.0.9:8000"]
    assert list(tmp_path.iterdir()) == [path], "no draft is left"
