"""Law: a trace that was written is read back equal, compressed or not."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_sched.simulators.traces import SampleRecord, Trace, Turn, gather, read, write
from rollout_sched.simulators.traces.model import UNIX_S

lengths = st.integers(1, 10**8)
times = st.floats(0, UNIX_S, exclude_max=True)
labels = st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2)


@st.composite
def samples(draw: st.DrawFn) -> SampleRecord:
    followed = draw(st.lists(st.builds(Turn, lengths, st.integers(0, 10**8), times), max_size=3))
    return SampleRecord(
        group=draw(st.text(max_size=3)),
        sample=draw(st.integers(0, 5)),
        prompt_tokens=draw(lengths),
        turns=(*followed, Turn(draw(lengths))),
        arrival_s=draw(times),
        finish=draw(st.sampled_from(["stop", "length", "cut", "unknown"])),
        version=draw(st.none() | st.integers(0, 10**6)),
        labels=draw(labels),
    )


traces = st.builds(
    lambda listed, name, cap, step: Trace(
        name or "unnamed",
        gather(listed),
        about=name,
        max_response_tokens=cap,
        prompts_per_step=step,
        samples_per_prompt=step and 2 * step,
    ),
    st.lists(samples(), min_size=1, max_size=8, unique_by=lambda s: (s.group, s.sample)),
    st.text(max_size=5),
    st.none() | lengths,
    st.none() | st.integers(1, 2**15),
)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces)
def test_reading_what_was_written(tmp_path: Path, suffix: str, trace: Trace) -> None:
    path = tmp_path / f"trace{suffix}"
    write(trace, path)
    back = read(path)
    assert back == trace
    assert list(back.groups) == list(trace.groups)
