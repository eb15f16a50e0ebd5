"""The driver's settings: timeouts, and what it does about faults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from rollout_sched.core.model.records import MAX_COUNT, MAX_SIZE, Count, Serial, Size
from rollout_sched.store import Durable

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All times in seconds.

    poll_s             between two polls of an instance's gauges
    poll_timeout_s     for the answer to one poll (vLLM with busy cores took 8.7 s)
    misses             polls in a row without an answer until the instance counts as lost: one that
                       hangs is noticed within misses * (poll_s + poll_timeout_s)
    control_timeout_s  for a pause, a resume, and each call when an instance joins
    update_timeout_s   for loading weights into an instance
    stall_s            without any progress, though requests run, until the instance counts as
                       lost; also without a new token on a stream that has begun, though others
                       progress, until that attempt is aborted
    forgotten_s        how long an instance may report fewer requests than we wait for there, until
                       we abort the oldest, which are made again if they do not answer the abort
                       either; `stall_s` if it has never made a token: its first step may compile
    prefill_rate       tokens per second of the slowest prefill: a request without tokens so far
                       gets the time for its prompt in addition to the last two times
    attempt_timeout_s  for a whole attempt; 0: no limit, as long answers need their time
    abort_timeout_s    how long an interrupted attempt may continue until it is given up
    stream_s           between two reports of the streams' progress to the core; 0: only when a
                       stream breaks
    on_contradiction   what happens to an answer with other versions than known of its instance, if
                       the instance confirms it: "server": it is delivered with those versions,
                       because somebody else has loaded them; "refuse": it is made again, and the
                       instance stays away until its version is right
    resume_paused      whether an instance that is paused when it joins is resumed and used,
                       whoever paused it; otherwise it stays away until it is resumed
    one_precision      an instance stays away if its precision is another than that of those that
                       have joined; otherwise a mixed fleet is only logged
    lease_s            how long a batch stays leased to a trainer that is not heard of, until
                       another may take it; 0: until that trainer comes back
    min_acceptance     share of an instance's drafted tokens that its model must accept, or the log
                       says that it does not; 0: never. Below the break-even acceptance that
                       `rollout-sched speculate` shows, drafting costs more than it gains
    max_mismatch       k3 between the rollouts' log-probs and those of the trainer under the same
                       weights, above which the log says so; 0: never. 0.01 is about 0.14 in each
                       token's log-prob
    durable            what of a run in a store survives a power failure: all that was confirmed to
                       a caller ("batch": each delivery, submission, publication and
                       acknowledgement), all events ("event"), or nothing for certain ("off"); the
                       death of the process costs at most a moment's events with any of them
    """

    poll_s: Positive = 1.0
    poll_timeout_s: Positive = 10.0
    misses: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)] = 3
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
    one_precision: bool = False
    lease_s: Seconds = 0.0
    min_acceptance: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    max_mismatch: Annotated[float, msgspec.Meta(ge=0)] = 0.01
    durable: Durable = "batch"


DEFAULTS = Settings()


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a live run besides its policy, in Python or as flags.

    prompts_per_step  groups in a batch of the trainer
    start_version     the trainer's version at the start; auto: the version that the instances
                      report
    stream_every      tokens between partial results of an instance, which survive its death; 0: no
                      streaming, which is faster
    seed              of the random choices of policies
    journal           write every event to this file, which must not exist yet
    journal_mb        without a store: megabytes after which the journal goes on in a new file, and
                      the full one is compressed and replaces the full one before; 0: never
    store             keep the run in this folder across restarts of the process: a run in it is
                      continued, otherwise a new one begins
    length_history    learn the response lengths of named prompts, and keep them in this file from
                      run to run
    """

    prompts_per_step: Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)] = 64
    start_version: Serial | Literal["auto"] = 0
    stream_every: Count = 0
    seed: Serial = 0
    journal: Path | None = None
    journal_mb: Size = 0
    store: Path | None = None
    length_history: Path | None = None
