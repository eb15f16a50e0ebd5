"""The requests of the overhead benchmark: how many in flight, their content and answers.

The bare instance reads its instructions from marks in the request (`bare_instance.c`), so that they
survive a router that rewrites the request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

MODEL = "fake"
PATH = "/v1/completions"

#: The load generator puts a new number here, so that all prompts differ.
FRESH = "{{ID}}"


@dataclass(frozen=True)
class Shape:
    """A closed loop of one kind of request.

    connections   requests in flight at any time
    body          of each request, JSON
    window_s      seconds measured, after `warm_up_s` without measurement
    hold_us       how long the instance holds each request; the arm adds the latency beyond it
    streams       whether answers are streams, so that events are counted instead of requests
    rounds        how often the judged arms go through the requested repetitions, for shapes whose
                  results vary much by chance
    """

    name: str
    about: str
    connections: int
    body: str
    window_s: float = 5.0
    warm_up_s: float = 1.0
    hold_us: int = 0
    streams: bool = False
    rounds: int = 1


def _text(marks: str, stream: bool = False) -> str:
    """A short prompt, a short answer."""
    body = {"model": MODEL, "prompt": f"{marks} {FRESH} count from one to ten", "max_tokens": 16}
    return _json({**body, "temperature": 1.0, **({"stream": True} if stream else {})})


def _rollout(prompt: object, **more: object) -> str:
    """An answer of 4,096 token ids and log-probs, 64 KB."""
    return _json({"model": MODEL, "prompt": prompt, "max_tokens": 4096, **more})


def _json(body: dict[str, object]) -> str:
    return json.dumps(body, separators=(",", ":"))


def _token_ids(count: int) -> list[int]:
    """Five digits each, as in a vocabulary of 100,000; no id repeats because 7,919 is a prime."""
    return [10_000 + number * 7_919 % 89_999 for number in range(count)]


def _held(connections: int) -> Shape:
    return Shape(
        f"held{connections}",
        f"{connections} requests at once, each held 2 s",
        connections,
        _text("@d=2000;@t=16;"),
        window_s=2.0,
        warm_up_s=3.5,
        rounds=5,
        hold_us=2_000_000,
    )


def _stream(connections: int) -> Shape:
    return Shape(
        f"stream{connections}",
        f"{connections} streams of 200 events, 10 ms apart",
        connections,
        _text("@n=200;@i=10000;", stream=True),
        window_s=2.0,
        warm_up_s=3.5,
        rounds=5,
        streams=True,
    )


def _shapes() -> list[Shape]:
    short = _text("@t=16;")
    text = _rollout(f"@t=4096; {FRESH} " + "lorem ipsum " * 1_024)
    tokens = _rollout(
        _token_ids(2_048), user=f"@t=4096; {FRESH}", logprobs=1, return_token_ids=True
    )
    return [
        Shape("short1", "one short request at a time", 1, short),
        Shape("short64", "64 short requests at once", 64, short),
        Shape("rl16", "16 at once, 12 KB of text in, 64 KB out", 16, text),
        Shape("rltok16", "16 at once, 2,048 token ids in, 64 KB out", 16, tokens),
        _held(256),
        _held(1_024),
        Shape(
            "brief64",
            "64 streams of 4 events at once: what it takes to begin and to end one",
            64,
            _text("@n=4;@i=1000;", stream=True),
            streams=True,
        ),
        _stream(64),
        _stream(256),
    ]


SHAPES = {shape.name: shape for shape in _shapes()}
DEFAULT = ("short64", "rltok16", "held1024", "stream256")
