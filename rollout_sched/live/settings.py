"""How patient the driver is with instances."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from rollout_sched.store.store import Durable

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All times in seconds.

    poll_s             between two looks at an instance's gauges
    poll_timeout_s     for the answer to one look (vLLM with busy cores took 8.7 s)
    misses             looks in a row without an answer until the instance counts as lost: one that
                       hangs is noticed within misses * (poll_s + poll_timeout_s)
    control_timeout_s  for a pause, a resume, and each question when it joins
    update_timeout_s   for bringing weights to an instance
    stall_s            without any progress, though requests run, until it counts as lost; and
                       without a new token of a stream that has begun, though others go on, until
                       that one is broken off
    forgotten_s        how long it may report fewer requests than we wait for there, until we break
                       off the oldest, to have them made again if they do not answer to that either;
                       `stall_s` for one that has never made a token, whose first step may compile
    prefill_rate       tokens that the slowest prefill computes in a second: a request that has
                       brought nothing yet gets the time for its prompt on top of the last two
    attempt_timeout_s  for a whole attempt; 0: none, for long answers take what they take
    abort_timeout_s    how long an interrupted attempt may go on before it is given up
    stream_s           how often the core hears how far streams are; 0: only when one breaks off
    on_contradiction   what becomes of an answer made by other versions than are known of its
                       instance, which stands by it: "server", it goes out under those versions,
                       for somebody else has loaded them; "refuse", it is made again, and the
                       instance stays away until its version is right
    resume_paused      whether an instance that is found paused when it joins is resumed and used,
                       whoever paused it; otherwise it stays away until it is resumed
    lease_s            how long a batch stays a trainer's that is not heard of, before another may
                       have it; 0: until it comes back, whatever happens
    durable            what of a run in a store survives a loss of power: all that somebody was told
                       ("batch": each delivery, submission, publication and acknowledgement), all
                       that happens ("event"), or nothing for certain ("off"); the death of the
                       process costs at most a moment's events with any of them
    """

    poll_s: Positive = 1.0
    poll_timeout_s: Positive = 10.0
    misses: Annotated[int, msgspec.Meta(ge=1)] = 3
    control_timeout_s: Positive = 15.0
    update_timeout_s: Positive = 600.0
    stall_s: Positive = 60.0
    forgotten_s: Positive = 10.0
    prefill_rate: Positive = 500.0
    attempt_timeout_s: Seconds = 0.0
    abort_timeout_s: Positive = 30.0
    stream_s: Seconds = 0.0
    on_contradiction: Literal["server", "refuse"] = "server"
    resume_paused: bool = False
    lease_s: Seconds = 0.0
    durable: Durable = "batch"


DEFAULTS = Settings()
