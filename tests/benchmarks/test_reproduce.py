"""Reproduction: every claim can be run, and the page says what came of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import reproduce
from benchmarks.cells import Cell, Lengths, trace_of
from benchmarks.claims import CLAIMS, Claim
from rollout_sched.config import load_policy
from rollout_sched.simulators.replay.workload import Workload

SMALL = Cell("", Lengths(8, 2, 100.0, 0.5, 0.5, 400), "tiny-cpu-2", prompts_per_step=4)


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim.system for claim in CLAIMS])
def test_a_claim_can_be_run(claim: Claim) -> None:
    for arm in (claim.baseline, claim.arm):
        load_policy(arm.policy).build()
        if isinstance(arm.trace, str):
            trace = trace_of(arm.trace, 0)
        else:
            trace = msgspec.structs.replace(arm.trace, groups=4).drawn(0)
        world = arm.world
        Workload(trace, world.job, steps=arm.steps).check_fits(world)
    assert claim.word.endswith(".")


def test_the_page_says_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = [
        msgspec.structs.replace(SMALL, policy=name) for name in ("round_robin_sync", "one_step_off")
    ]
    claim = Claim("Some system", "9x", "total", *arms, "A word.")
    monkeypatch.setattr(reproduce, "CLAIMS", (claim, msgspec.structs.replace(claim, system="B")))
    page = tmp_path / "page.md"
    arguments = ["--only", "some", "--draws", "2", "--jobs", "1", "--kept", str(tmp_path / "runs")]
    reproduce.main([*arguments, "--out", str(page)])
    text = page.read_text()
    assert "| Some system | 9x | 1." in text
    assert "| B |" not in text
    assert "`round_robin_sync` against `one_step_off` on tiny-cpu-2" in text
    reproduce.main(arguments)
    assert capsys.readouterr().out.rstrip() == text.rstrip()
