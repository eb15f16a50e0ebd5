"""What `serve` does where it is told nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from rollout_sched.integrations.gateway.data_plane.reply import Limits
from rollout_sched.integrations.gateway.options import (
    Options,
    add_gateway_flags,
    add_worker_flags,
    given_options,
)
from rollout_sched.live.settings import RunOptions


def test_a_run_is_as_anywhere_else() -> None:
    options, run = Options(policy="dplb", instances=[]), RunOptions()
    for field in msgspec.structs.fields(RunOptions):
        assert getattr(options, field.name) == getattr(run, field.name)


def test_limits_are_those_of_the_data_plane() -> None:
    options = Options(policy="dplb", instances=[])
    assert (options.max_requests, options.max_bodies) == (Limits().requests, Limits().body_bytes)
    assert options.max_body <= options.max_bodies


def test_two_gateways_share_nothing() -> None:
    one, two = (Options(policy="dplb", instances=[]) for _ in range(2))
    assert one.live is not two.live
    assert one.allow_instances is not two.allow_instances


def test_a_policy_must_be_given() -> None:
    with pytest.raises(TypeError):
        Options(instances=[])  # type: ignore[call-arg]


def given(*words: str) -> Options:
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    add_gateway_flags(parser)
    return given_options(parser.parse_args(["--policy", "dplb", *words]))


def test_options_have_the_defaults() -> None:
    assert given() == Options(policy="dplb")


def test_every_option_has_a_flag() -> None:
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    add_gateway_flags(parser)
    add_worker_flags(parser)
    flags = {action.dest.rpartition(".")[2] for action in parser._actions}
    # `live` has those of the driver's settings, and no operator has to know `max_bodies`.
    assert set(Options.__struct_fields__) - flags == {"live", "max_bodies"}


def test_options_of_gateway_run_and_driver_are_read() -> None:
    options = given(
        *("--instance", "http://a:1", "--instance", "http://b:2", "--port", "0"),
        *("--store", "here", "--prompts-per-step", "7", "--poll-s", "3", "--max-body", "2"),
    )
    assert options.instances == ["http://a:1", "http://b:2"]
    assert (options.port, options.store, options.prompts_per_step) == (0, Path("here"), 7)
    assert options.live == {"poll_s": 3.0}
    assert options.max_body == 2 * 2**20


@pytest.mark.parametrize("words", [("--port", "70000"), ("--max-body", "0"), ("--poll-s", "x")])
def test_impossible_values_are_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        given(*words)
    assert words[0] in capsys.readouterr().err
