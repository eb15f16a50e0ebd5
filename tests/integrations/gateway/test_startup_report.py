"""What a gateway says when it starts: what is open, and by which flag that is changed."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path

import pytest

from rollout_sched import load_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.auth import Access, AccessControl
from rollout_sched.integrations.gateway.serve import AdminSocket, startup_report

POLICY = load_policy("dplb")
OPEN = AccessControl()


def said(auth: AccessControl = OPEN, host: str = "127.0.0.1", *, sessions: bool = True) -> str:
    return "\n".join(startup_report(POLICY, auth, host, keeps_sessions=sessions))


def test_the_report_names_every_role() -> None:
    first = said().splitlines()[0]
    assert first.startswith("rollout-sched ")
    assert "policy dplb (" in first
    assert all(f"{role} {kind.__name__}" in first for role, (kind, _) in POLICY.roles.items())


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_the_report_says_who_may_use_the_gateway(host: str, warns: bool) -> None:
    assert ("--api-key-file closes it" in said(host=host)) is warns
    keys = AccessControl({Access.CLIENT: ["k"]})
    assert "--api-key-file" not in said(keys, host)


def test_the_report_says_who_may_change_the_gateway() -> None:
    assert "open to programs on this machine only" in said()
    keys = AccessControl({Access.TRAINER: ["k"]})
    assert "/admin is closed; --admin-key-file or --admin-socket opens it" in said(keys)


@pytest.mark.parametrize("sessions", [True, False])
def test_the_report_says_whether_sessions_matter(sessions: bool) -> None:
    assert ("X-Session-ID is ignored" in said(sessions=sessions)) is not sessions


class Greets(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(b"hello")
        transport.close()


@pytest.mark.real_time
async def test_a_socket_answers_its_owner_until_closed(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    admin = AdminSocket(path)
    admin.close()  # not open yet
    await admin.open(Greets)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    reader, writer = await asyncio.open_unix_connection(path)
    assert await reader.read() == b"hello"
    writer.close()
    other = AdminSocket(path)
    with pytest.raises(CallerError, match="another gateway listens on it"):
        await other.open(Greets)
    other.close()
    assert path.exists()
    admin.close()
    assert not path.exists()


@pytest.mark.real_time
async def test_a_stale_socket_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    admin = AdminSocket(path)
    await admin.open(Greets)
    admin.close()


def test_an_impossible_socket_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    for path in (tmp_path / "precious", tmp_path / "nowhere" / "admin"):
        admin = AdminSocket(path)
        with pytest.raises(CallerError, match=f"--admin-socket {path}"):
            asyncio.run(admin.open(Greets))
        admin.close()
    assert (tmp_path / "precious").read_text() == "data"
