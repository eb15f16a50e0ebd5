"""What is handed out: frozen, compared by value, and the same after JSON."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.core.model.records import DeliveredSample, Segment

SAMPLE = DeliveredSample(
    "a/0", "a", 0, 10, 7, (Segment(3, 4, "i0"), Segment(4, 3, "i1")), 1, "stop"
)


def test_what_is_handed_out_is_frozen_and_compared_by_value() -> None:
    assert Segment(3, 4, "i0") == SAMPLE.segments[0]
    assert msgspec.structs.replace(SAMPLE) == SAMPLE
    for thing, field in [(SAMPLE.segments[0], "tokens"), (SAMPLE, "staleness")]:
        with pytest.raises(AttributeError):
            setattr(thing, field, 99)


def test_a_sample_survives_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SAMPLE), type=DeliveredSample) == SAMPLE
