"""A short run of every target with one seed, and tests that the runner finds broken laws."""

from __future__ import annotations

import random
import time

import pytest

from tests.fuzz import bounds, corpus
from tests.fuzz.corpus import FOLDER
from tests.fuzz.engine import failure, run
from tests.fuzz.laws import hold
from tests.fuzz.target import next_input
from tests.fuzz.targets import TARGETS

#: Generated inputs beyond the corpus, for about a second each.
INPUTS = {
    "http-server": 1500,
    "http-client": 2000,
    "envelope": 5000,
    "calls": 500,
    "answers": 400,
    "answer-scans": 4000,
    "streams": 400,
    "orders": 3000,
    "store-files": 40,
    "control-calls": 200,
    "policies": 200,
    "scenarios": 400,
    "traces": 600,
    "endpoints": 300,
}


def test_corpus_files_belong_to_a_target():
    """Otherwise the file would never be tried."""
    assert {path.name for path in FOLDER.iterdir()} <= set(TARGETS)


def test_a_finding_can_be_saved(monkeypatch, tmp_path):
    monkeypatch.setattr(corpus, "FOLDER", tmp_path)
    assert corpus.kept("toy") == ()
    corpus.keep("toy", b"x")
    assert corpus.kept("toy") == (b"x",)
    report = run(Toy(on=b"nothing of the sort", do=None), 1, inputs=1)
    assert not report.failures
    corpus.keep("toy", b"y")
    assert [found.data for found in run(Toy(on=b"y"), 1, inputs=1).failures.values()] == [b"y"]


@pytest.mark.parametrize("name", TARGETS)
def test_every_law_holds_for_a_while(name):
    report = run(TARGETS[name], 1, inputs=INPUTS[name])
    told = [f"{found.told}\n  {found.command(name)}" for found in report.failures.values()]
    assert not told, "\n".join(told)
    assert report.inputs >= INPUTS[name]


class Toy:
    """Calls `do` (default: breaks a law) if an input contains `on`."""

    name = "toy"
    corpus = (b"a long beginning, x and a long end",)
    words = (b"x",)

    def __init__(self, on=b"x", do=None):
        self._on = on
        self._do = do or (lambda data: hold("no x", False, data))

    def make(self, rng):
        return b"a"

    def check(self, data):
        if self._on in data:
            self._do(data)

    spend = check


def test_a_failure_is_shrunk_and_repeatable():
    report = run(Toy(), 1, inputs=10)
    (found,) = report.failures.values()
    assert (found.law, found.data) == ("no x", b"x")
    assert found.command("toy") == "python -m tests.fuzz --target toy --input 78"
    assert failure(Toy(), b"ax") is not None
    assert failure(Toy(), b"a") is None


def test_an_unexpected_error_is_a_failure():
    def fail(data):
        raise KeyError(data)

    found = failure(Toy(do=fail), b"x")
    assert found is not None
    assert "KeyError in fail" in found.law


def test_one_seed_makes_the_same_inputs():
    for target in TARGETS.values():
        made = [
            [next_input(target, rng) for _ in range(100)]
            for rng in (random.Random(7), random.Random(7), random.Random(8))
        ]
        assert made[0] == made[1] != made[2]


def test_an_input_that_takes_too_long_is_a_failure(monkeypatch):
    def spin(data):
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                sum(range(1000))
            except Exception:
                continue

    monkeypatch.setattr(bounds, "CPU_S", 0.1)
    found = failure(Toy(do=spin), b"x")
    assert found is not None
    assert "takes less than" in found.law


def test_an_input_that_needs_much_memory_is_a_failure():
    kept = []
    with pytest.raises(Exception, match="little memory"):
        bounds.check_memory(lambda data: kept.append(bytearray(bounds.MEMORY * 2)), b"x")


@pytest.mark.parametrize(("power", "broken"), [(1, False), (2, True)])
def test_a_cost_that_grows_with_the_square_is_a_failure(power, broken, monkeypatch):
    monkeypatch.setattr(bounds, "NOISE_S", 0.02)
    monkeypatch.setattr(bounds, "SMALL", 4096)
    monkeypatch.setattr(bounds, "LARGE", 8 * 4096)

    def spend(data):
        for _ in range(len(data) // 64 if power == 2 else 200):
            sum(data)

    found = failure(Toy(do=spend), b"xa", (1, 2))
    assert (found is not None) is broken
