"""What a gateway says when it starts: what is open, and by which flag that is changed."""

from __future__ import annotations

import pytest

from rollout_sched import load_policy
from rollout_sched.integrations.gateway.control_plane.auth import Access, AccessControl
from rollout_sched.integrations.gateway.serve import startup_report

POLICY = load_policy("dplb")
OPEN = AccessControl()


def said(auth: AccessControl = OPEN, host: str = "127.0.0.1", *, sessions: bool = True) -> str:
    return "\n".join(startup_report(POLICY, auth, host, keeps_sessions=sessions))


def test_its_policy_with_every_role() -> None:
    first = said().splitlines()[0]
    assert first.startswith("rollout-sched ")
    assert "policy dplb (" in first
    assert all(f"{role} {kind.__name__}" in first for role, (kind, _) in POLICY.roles.items())


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_who_may_use_it(host: str, warns: bool) -> None:
    assert ("--api-key-file closes it" in said(host=host)) is warns
    keys = AccessControl({Access.CLIENT: ["k"]})
    assert "--api-key-file" not in said(keys, host)


def test_who_may_change_it() -> None:
    assert "open to programs on this machine only" in said()
    keys = AccessControl({Access.TRAINER: ["k"]})
    assert "/admin is closed; --admin-key-file or --admin-socket opens it" in said(keys)


@pytest.mark.parametrize("sessions", [True, False])
def test_whether_it_means_anything_to_name_a_session(sessions: bool) -> None:
    assert ("X-Session-ID is ignored" in said(sessions=sessions)) is not sessions
