"""What instances say of themselves is fit for logs and answers."""

from __future__ import annotations

import pytest

from rollout_sched.live.ports import EXCERPT, AnswerUntrue, InstanceError, InstanceGone


@pytest.mark.parametrize("kind", [InstanceError, InstanceGone, AnswerUntrue])
def test_an_instances_error_is_one_line_and_not_long(kind: type[InstanceError]) -> None:
    said = str(kind("no\r\nINFO all is well \x1b[2J\u202e" + "x" * 10_000))
    assert said.isprintable()
    assert said.startswith("no  INFO all is well")
    assert len(said) <= EXCERPT + 3
