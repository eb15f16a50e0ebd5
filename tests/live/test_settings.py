"""What a run may be told beside its policy."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.integrations.gateway.options import Options
from rollout_sched.live.settings import RunOptions


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompts_per_step", 0),
        ("start_version", -1),
        ("start_version", "newest"),
        ("stream_every", -1),
        ("seed", -1),
    ],
)
@pytest.mark.parametrize("kind", [RunOptions, Options])
def test_impossible_options_are_refused_by_name(kind, field, value):
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({field: value}, kind)


def test_a_version_is_a_number_or_that_of_the_instances():
    for version in (0, 7, "auto"):
        assert msgspec.convert({"start_version": version}, RunOptions).start_version == version


def test_a_gateway_takes_all_that_a_run_in_python_takes():
    fields = {field.name: field.default for field in msgspec.structs.fields(RunOptions)}
    gateway = {field.name: field.default for field in msgspec.structs.fields(Options)}
    assert fields.items() <= gateway.items()
