"""The same two routes under both roots."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.gateway.control_plane.app import ADMIN
from rollout_sched.integrations.gateway.control_plane.trainer_api import ROLLOUT
from tests.integrations.gateway.house import House, Upstream, run


@pytest.mark.parametrize("root", [ADMIN, ROLLOUT])
def test_weights_are_published_and_the_state_says_so(root: str) -> None:
    async def scene() -> None:
        async with House(Upstream()) as house:
            body = {"version": 1, "applied": True, "wait": True}
            assert await house.ask("POST", f"{root}/weights", body) == (200, {"version": 1})
            body = {"version": 2, "applied": True}
            assert await house.ask("POST", f"{root}/weights", body) == (202, {"version": 2})
            status, state = await house.ask("GET", f"{root}/state")
            assert (status, state["version"]) == (200, 2)
            assert (await house.ask("POST", f"{root}/weights", body))[0] == 400

    run(scene())


@pytest.mark.parametrize("root", [ADMIN, ROLLOUT])
def test_neither_is_for_clients(root: str) -> None:
    async def scene() -> None:
        async with House(Upstream(), admin_key_file=None, admin_key="") as house:
            header = {"X_Forwarded_For": "9.9.9.9"}
            assert (await house.ask("GET", f"{root}/state", **header))[0] == 403
            assert (await house.ask("POST", f"{root}/weights", {}, **header))[0] == 403

    run(scene())
