"""What a front tells Prometheus."""

from __future__ import annotations

from rollout_sched.integrations.gateway.data_plane.data_plane import DataPlane
from rollout_sched.integrations.gateway.front_service import FrontMetrics
from rollout_sched.link.front import FrontCalls
from tests.integrations.gateway.house import run
from tests.link.wires import Shared


def test_calls_and_connections() -> None:
    async def scene() -> None:
        calls = FrontCalls("f0", Shared({}), lambda error: None)
        data_plane = DataPlane(calls, resumable=True)
        data_plane.calls.responses.end(b"POST", b"/", 499, 0.0)
        data_plane.refused = 2
        calls.connections, calls.connected = 3, True
        page, content_type = FrontMetrics(calls, data_plane).page()
        lines = page.decode().splitlines()
        assert content_type.startswith("text/plain")
        assert 'rollout_sched_http_responses_total{code="499",plane="data"} 1.0' in lines
        assert "rollout_sched_refused_total 2.0" in lines
        assert "rollout_sched_scheduler_connected 1.0" in lines
        assert "rollout_sched_schedulers_total 3.0" in lines
        assert "process_resident_memory_bytes" in page.decode()
        await calls.close()

    run(scene())
