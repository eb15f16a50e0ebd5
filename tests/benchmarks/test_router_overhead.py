"""The overhead bench from end to end, in small: real programs, a fraction of a second each."""

from __future__ import annotations

import shutil
import sys
from urllib.request import urlopen

import msgspec
import pytest

from benchmarks.live import arms, request_shapes, router_overhead
from benchmarks.live.arms import Arm
from benchmarks.live.machine import Patience
from benchmarks.live.processes import Processes, StartError, free_port, url
from benchmarks.live.request_shapes import Shape

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and a C compiler"
)

GATEWAY = arms.interpreted().name


def small(name, marks="@t=16;", **more):
    body = {"model": "fake", "prompt": f"{marks} {request_shapes.FRESH}", "max_tokens": 16}
    if more.get("streams"):
        body["stream"] = True
    text = msgspec.json.encode(body).decode()
    return Shape(name, name, 4, text, window_s=0.4, warm_up_s=0.1, **more)


@pytest.fixture(scope="module")
def bench():
    with Processes() as processes:
        generator = processes.build(router_overhead.HERE / "load_generator.c")
        program = processes.build(router_overhead.HERE / "bare_instance.c")
        instances = [free_port() for _ in range(2)]
        for port in instances:
            processes.start(f"instance-{port}", [str(program), str(port)], None)
        yield router_overhead.Bench(
            processes,
            generator,
            instances,
            foreign_limit=1.0,
            patience=Patience(0),
            attempts=1,
            scale=1.0,
        )


@pytest.fixture(scope="module")
def running(bench):
    found = arms.start(
        [arms.interpreted(), arms.direct()],
        bench.instances,
        bench.processes,
        None,
        request_shapes.MODEL,
    )
    return {one.arm.name: one for one in found}


def connections(bench):
    """How many the instances have accepted so far."""
    stats = [urlopen(url(port, "/stats"), timeout=5).read() for port in bench.instances]
    return sum(msgspec.json.decode(one)["connections"] for one in stats)


@pytest.mark.parametrize("once", [False, True])
def test_rounds_after_the_first_are_for_those_that_are_judged(monkeypatch, once):
    shape = Shape("chance", "up to chance", 1, "{}", rounds=3)
    monkeypatch.setitem(request_shapes.SHAPES, "chance", shape)
    names = ("direct", arms.REFERENCE, arms.OURS)
    running = [arms.Running(Arm(name, None), [], None) for name in names]

    class Taken:
        foreign = cpu_us = 0.0

        def measure(self, shape, one, repetition):
            self.taken.append((repetition, one.arm.name))
            return self

    bench = Taken()
    bench.taken = []
    router_overhead.measure_all(bench, ["chance"], running, 2, once=once)
    first = {(repetition, name) for repetition in (0, 1) for name in names}
    more = {(repetition, name) for repetition in (2, 3, 4, 5) for name in names[1:]}
    assert len(bench.taken) == len(set(bench.taken))
    assert set(bench.taken) == (first if once else first | more)


@pytest.mark.parametrize("arm", [GATEWAY, "direct"])
def test_short_requests_are_counted_and_spread(bench, running, arm):
    before = connections(bench)
    found = bench.measure(small("short"), running[arm], 0)
    assert found.errors == 0
    assert found.answered > 20
    assert connections(bench) - before < found.answered  # used again, as before a real server
    assert 1 <= found.balance < 2
    assert 0 < found.added_p50 <= found.added_p99
    assert (found.rss_mb > 1) is (arm == GATEWAY)


def test_overhead_excludes_the_time_of_the_instance(bench, running):
    shape = small("held", "@d=200;@t=16;", hold_us=200_000)
    found = bench.measure(shape, running[GATEWAY], 0)
    assert found.errors == 0
    assert 0 < found.added_p50 < 200_000


def test_events_of_streams_are_counted_and_timed(bench, running):
    shape = small("stream", "@n=10;@i=5000;", streams=True)
    found = bench.measure(shape, running[GATEWAY], 0)
    assert found.errors == 0
    assert 0 < found.transit_p50 <= found.transit_p99 < 1e6
    # a fifth of a second at least for four streams of 200 events a second each
    assert found.per_s > 160


def test_answers_that_are_not_200_are_errors(bench, running, monkeypatch):
    monkeypatch.setattr(request_shapes, "PATH", "/nowhere")
    found = bench.measure(small("lost"), running[GATEWAY], 0)
    assert found.answered == 0
    assert found.errors > 0


def test_an_arm_that_does_not_come_up_says_what_it_wrote(bench):
    arm = Arm("broken", lambda place: [sys.executable, "-c", "print('no such option')"])
    with pytest.raises(StartError, match=r"(?s)broken exited.*no such option"):
        arms.start([arm], bench.instances, bench.processes, None, request_shapes.MODEL)


def test_an_arm_that_is_not_installed_is_named_and_left_out(bench, capsys):
    arm = Arm("absent", lambda place: ["/nowhere/at-all"])
    assert arms.start([arm], bench.instances, bench.processes, None, request_shapes.MODEL) == []
    assert "absent is left out: /nowhere/at-all is not installed" in capsys.readouterr().out


def test_an_unknown_arm_or_shape_is_refused(capsys):
    for option in ("--arms", "--shapes"):
        with pytest.raises(SystemExit):
            router_overhead.parse([option, "short63"])
        assert "'short63' is none of" in capsys.readouterr().err
