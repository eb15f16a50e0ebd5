"""Flags are derived from a struct: what it says, they say."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from rollout_sched.flags import (
    Flag,
    above_zero,
    add_flags,
    given_flags,
    meanings,
    number,
    positive,
)
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray.deployment import Deployment
from rollout_sched.live.settings import Settings
from rollout_sched.simulators.replay.command import ReplayOptions
from rollout_sched.simulators.replay.scenario import Job
from rollout_sched.simulators.tune.search import Plan


class Patience(msgspec.Struct):
    """How patient.

    look_s   between two looks; a long
             explanation of 100 %
    tries    how often
    give_up  whether to give up
    log      where to complain
    sizes    in thousands

    Not about a field:  this.
    """

    look_s: Annotated[float, msgspec.Meta(gt=0)] = 1.5
    tries: Annotated[int, msgspec.Meta(ge=1)] = 3
    give_up: bool = False
    log: Path | None = None
    sizes: Annotated[list[int], Flag("--size", "K", unit=1000)] = msgspec.field(
        default_factory=list
    )


def parsed(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_flags(parser, Patience)
    return given_flags(parser.parse_args(arguments), Patience)


def test_only_given_flags_count() -> None:
    assert parsed() == {}
    assert parsed("--look-s", "2", "--tries", "5") == {"look_s": 2.0, "tries": 5}
    assert parsed("--log", "a/b") == {"log": Path("a/b")}
    assert parsed("--give-up") == {"give_up": True}
    assert parsed("--no-give-up") == {"give_up": False}
    assert parsed("--size", "1", "--size", "2") == {"sizes": [1000, 2000]}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--look-s", "0"], "> 0"),
        (["--look-s", "inf"], "finite"),
        (["--look-s", "nan"], "--look-s"),
        (["--tries", "1.5"], "int"),
        (["--tries", "0"], ">= 1"),
        (["--tries", ""], "--tries"),
    ],
)
def test_values_the_struct_refuses_are_usage_errors(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*arguments)
    assert says in capsys.readouterr().err


def test_the_help_is_the_docstring_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "--look-s SECONDS between two looks; a long explanation of 100 % (default: 1.5)" in said
    assert "--give-up, --no-give-up whether to give up (default: no)" in said
    assert "Not about" not in said


@pytest.mark.parametrize("kind", [Settings, Options, Deployment, ReplayOptions, Job, Plan])
def test_every_option_is_explained(kind: type[msgspec.Struct]) -> None:
    assert set(meanings(kind)) == set(kind.__struct_fields__)


# -- Types of arguments: what they take, and what they say of what they do not --


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (positive, "1", 1),
        (number, "-1.5", -1.5),
        (above_zero, "0.5", 0.5),
    ],
)
def test_taken(kind: Callable[[str], float], text: str, value: float) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (positive, "0"),
        (positive, "1.5"),
        (positive, "many"),
        (number, "nan"),
        (number, "inf"),
        (number, "ten"),
        (above_zero, "0"),
        (above_zero, "-3"),
    ],
)
def test_refused_by_name(kind: Callable[[str], float], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        kind(text)
