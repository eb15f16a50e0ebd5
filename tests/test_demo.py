"""The live demo: processes of our own, a trainer, and a table that the journal backs."""

from __future__ import annotations

import pytest

from rollout_sched import demo
from rollout_sched.core.errors import CallerError


def test_a_policy_at_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "STEPS", 2)
    monkeypatch.setattr(demo, "PROMPTS_PER_STEP", 4)
    results = []
    monkeypatch.setattr(demo, "_table", lambda made, simulated: results.extend(made) or "")
    demo.demo(demo.DemoOptions(policies=["areal"], speed=200.0))
    (result,) = results
    assert result.live.samples_delivered == 40
    assert result.live.steps == 2
    assert result.live.staleness_max <= 3
    assert result.predicted_s is not None
    # On a busy machine the live run may take longer; it is never faster than what is simulated.
    assert result.live.total_s > 0.8 * result.predicted_s
    assert "8/8 prompts trained" in capsys.readouterr().out


def test_real_instances_need_weights() -> None:
    with pytest.raises(CallerError, match="--weights"):
        demo.demo(demo.DemoOptions(instances=["http://127.0.0.1:1"]))
