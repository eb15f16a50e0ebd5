"""Makes a scenario from journals: the fleet, the trainer and the costs of the recorded run.

What the run does not tell is taken from a base, and so is what it does not contradict. The file
says of each value where it comes from, and how sure it is.
"""

from __future__ import annotations

import json
import math
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout_sched.core.errors import CallerError
from rollout_sched.inspection.engine_fit import FACTORS, EngineFit, fit_engine
from rollout_sched.inspection.recording import Recording
from rollout_sched.inspection.rounds import find_rounds
from rollout_sched.inspection.scenario_fold import RunTimes, ScenarioFold, TrainerStep
from rollout_sched.metrics.fold import Folded
from rollout_sched.simulators.replay import Scenario, parse_scenario
from rollout_sched.simulators.traces import Trace

#: A value of the base stays if the run's is no further from it.
_SAME = 0.005
#: The steps tell the trainer's time per token if their tokens differ by as much.
_DIFFER = 0.03
_DIGITS = 4
_WIDTH = 100
#: Faults that a journal shows.
_SHOWN = ("joins", "lost", "leaving", "scheduler_restarts")


class RunScenario(NamedTuple):
    """`text`: the TOML file of the scenario. `in_rounds`: its trainer sent requests in rounds."""

    scenario: Scenario
    text: str
    times: RunTimes
    in_rounds: bool


def run_times(recordings: Sequence[Recording]) -> RunTimes:
    """What the run of these journals took. Raises JournalError."""
    return _folded(recordings, keeps_kv=False).times


def run_scenario(recordings: Sequence[Recording], trace: Trace, base: Scenario) -> RunScenario:
    """The scenario of the journals of one run, whose workload is `trace`.

    Raises JournalError, ConfigError, and CallerError if no instance is in them.
    """
    fold = _folded(recordings, keeps_kv=base.trainer.keeps_kv)
    if not fold.joined:
        raise CallerError(f"{recordings[0].path}: no instance ever joined")
    name = recordings[0].path.name.split(".")[0]
    found = _Tables(fold, base)
    found.fill(trace)
    where, header = recordings[0].path.name, recordings[0].header
    about = f"The run of {where} under {header.policy}."
    said = [
        f"From {where}, a run under {header.policy} of {fold.times.total_s:,.0f} s. What is not "
        f"followed by a remark is that of {base.name}.",
        *found.said,
    ]
    prose = {"about": about, "source": "rollout-sched journal scenario"}
    text = _toml(said, {**prose, **found.tables}, found.remarks)
    scenario = parse_scenario(name, tomllib.loads(text))
    return RunScenario(scenario, text, fold.times, fold.in_rounds)


def _folded(recordings: Sequence[Recording], *, keeps_kv: bool) -> ScenarioFold:
    recordings = sorted(recordings, key=lambda recording: recording.continues_at)
    rounds = find_rounds(chain.from_iterable(recording.events() for recording in recordings))
    fold = ScenarioFold(rounds, keeps_kv=keeps_kv)
    observe = Folded(fold).observe
    for recording in recordings:
        recording.tell([observe, fold.observe])
    fold.close()
    return fold


class _Tables:
    """The tables of the scenario, with a remark on each value that the run tells.

    said  paragraphs for the head of the file
    """

    def __init__(self, fold: ScenarioFold, base: Scenario) -> None:
        self.tables: dict[str, Any] = {
            name: table
            for name, table in msgspec.to_builtins(base).items()
            if table is not None and name not in ("name", "about", "source")
        }
        self.remarks: dict[tuple[str, str], str] = {}
        self.said: list[str] = []
        self._fold = fold
        self._base = base
        self._numbers = _numbers(list(fold.joined))

    def fill(self, trace: Trace) -> None:
        self._fleet()
        self._faults()
        self._trainer()
        self._weights()
        self._visibility()
        self._rewards()
        self._job(trace)
        self._cost()

    def _put(self, table: str, key: str, value: Any, remark: str) -> None:
        """A value that the run tells; the base's if that is hardly another."""
        there = self.tables.setdefault(table, {})
        before = there.get(key)
        number = isinstance(value, float) and isinstance(before, int | float)
        if not (number and math.isclose(value, before, rel_tol=_SAME)):
            there[key] = _rounded(value) if isinstance(value, float) else value
        self.remarks[table, key] = remark

    def _fleet(self) -> None:
        joined, base = list(self._fold.joined.values()), self._base
        drafts = base.speculation
        if drafts is not None and self._fold.reported and not self._fold.drafted:
            del self.tables["speculation"]
            self.said.append("The run drafted no tokens, so [speculation] is left out.")
            drafts = None
        share = 0.0 if drafts is None else drafts.kv_share
        self._put("fleet", "instances", len(joined), "that joined")
        kv = [event.kv_tokens for event in joined]
        if set(kv) != {base.instance.kv_tokens} or drafts is not base.speculation:
            self._put("fleet", "kv_tokens", round(median(kv) / (1 - share)), _range(kv))
        slots = [event.slots for event in joined]
        self._put("fleet", "max_num_seqs", round(median(slots)), _range(slots))
        budget = max(self.tables["fleet"]["max_num_batched_tokens"], *slots, 1)
        self.tables["fleet"]["max_num_batched_tokens"] = budget
        lengths = [event.max_model_len for event in joined if event.max_model_len]
        if lengths:
            self._put("fleet", "max_model_len", max(lengths), _range(lengths))

    def _faults(self) -> None:
        """Those that the journal shows, and of the base those that it does not show."""
        began = self._fold.began_s
        found = []
        for fault in self._fold.faults:
            shown = {key: value for key, value in fault.items() if key not in ("name", "gone_s")}
            shown["at_s"] = max(0.0, fault["at_s"] - began)
            if "name" in fault:
                shown["instance"] = self._numbers[fault["name"]]
            found.append(shown)
        of_base = self.tables.pop("faults", [])
        others = [fault for fault in of_base if fault["what"] not in _SHOWN]
        if not _alike(found, [fault for fault in of_base if fault["what"] in _SHOWN]):
            of_base = [*found, *others]
            self.said.append("[[faults]]: instances that joined later or were lost.")
        if of_base and len(self._numbers) == self._base.fleet.instances:
            self.tables["faults"] = of_base
        elif found:
            self.tables["faults"] = found

    def _trainer(self) -> None:
        fold, base = self._fold, self._base.trainer
        steps = [step for step in fold.steps if step.train_s is not None]
        placement = "colocated" if fold.colocated else "disaggregated"
        self._put("trainer", "placement", placement, "as it asked for batches")
        if fold.in_rounds:
            self.said.append(
                f"The trainer sent its requests in {len(fold.rounds)} rounds; its time is the "
                f"silence between them, less that of new weights."
            )
        if not steps:
            self.said.append("No step was trained and published: the trainer is the base's.")
            return
        staged_s = 0.0
        if self._base.weights.staged:
            staged_s = self._base.least_update_s - self._base.weights.from_host_s
        measured = np.asarray([step.train_s for step in steps]) - staged_s

        def off(fixed_s: float, per_token: float) -> float:
            said = fixed_s + np.asarray([step.left_s(per_token) for step in steps])
            return float(np.median(np.abs(said - measured) / np.maximum(measured, 1e-3)))

        of_base = off(base.fixed_s, base.seconds_per_token)
        span = f"{measured.min():.3g} to {measured.max():.3g} s"
        if of_base <= _SAME:
            remark = f"{len(steps)} steps took {span}, the base says so within {of_base:.1%}"
            self.remarks["trainer", "fixed_s"] = remark
            return
        fixed_s, per_token, error_s, error = _fit_trainer(steps, measured, base.seconds_per_token)
        if error is None:
            remark = "the base's, as the steps hardly differ in tokens"
            self._put("trainer", "seconds_per_token", per_token, remark)
        else:
            self._put("trainer", "seconds_per_token", per_token, f"+- {error:.1g}")
        within = off(fixed_s, per_token)
        remark = f"+- {error_s:.2g}; {len(steps)} steps of {span}, off by {within:.1%}"
        self._put("trainer", "fixed_s", fixed_s, remark)

    def _weights(self) -> None:
        base = self._base
        each = {self._numbers[name]: all_s for name, all_s in self._fold.updates.items()}
        seconds = [one for all_s in each.values() for one in all_s]
        if not seconds:
            if len(self._fold.steps) > 1 and not self._fold.published:
                self._put("weights", "fixed_s", 0.0, "none were published")
                self.tables["weights"] |= {"bytes": 0.0, "convert_s": 0.0, "staged": False}
            return
        usual = median(seconds)
        by_instance = [median(each[number]) for number in sorted(each)]
        remark = f"{len(seconds)} updates of {min(seconds):.3g} to {max(seconds):.3g} s"
        if len(by_instance) > 1:
            remark += f", by instance {min(by_instance):.3g} to {max(by_instance):.3g} s"
        cost = base.weights
        one_path = not base.network and not cost.convert_s
        says_s = cost.from_host_s if cost.staged else cost.seconds
        if one_path and not math.isclose(usual, says_s, rel_tol=_SAME, abs_tol=1e-3):
            self.tables["weights"] = {"fixed_s": 0.0}
            self._put("weights", "fixed_s", usual, remark)
            return
        self.remarks["weights", "fixed_s"] = f"{remark}; the base says {says_s:.3g} s"
        if not one_path:
            self.said.append("The way of the weights, their network, is that of the base.")

    def _visibility(self) -> None:
        for key, found in (("poll_s", self._fold.poll_s), ("stream_s", self._fold.stream_s)):
            value = median(found) if len(found) > len(self._numbers) else 0.0
            if value or self.tables["visibility"][key]:
                self._put("visibility", key, value, "as the journal has them")

    def _rewards(self) -> None:
        found = self._fold.judged_s
        if not found:
            self.tables.pop("rewards", None)
            return
        usual, base = median(found), self._base.rewards
        remark = f"{len(found)} groups, {min(found):.3g} to {max(found):.3g} s"
        if base is None or not base.spread:
            self._put("rewards", "seconds", usual, remark)
        else:
            self.remarks["rewards", "seconds"] = f"the base's; {remark}"

    def _job(self, trace: Trace) -> None:
        job = {"redraws": self._base.job.redraws}
        self.tables["job"] = job
        asked = trace.prompts_per_step
        if asked is None:  # clients that come when they like
            job["batches"] = False
            self.tables["traffic"] = {}
            return
        self.tables.pop("traffic", None)
        self._put("job", "prompts_per_step", asked, "")
        self._put("job", "samples_per_prompt", trace.group_size, "")
        self._put("job", "max_tokens", trace.cap, "")

    def _cost(self) -> None:
        fleet = self.tables["fleet"]
        joined = self._fold.joined
        drafts = self._base.speculation if "speculation" in self.tables else None
        fit = fit_engine(
            self._fold.attempts,
            self._fold.pauses(),
            {name: event.slots for name, event in joined.items()},
            {name: event.kv_tokens for name, event in joined.items()},
            self._base.cost,
            budget=fleet["max_num_batched_tokens"],
            speculation=drafts,
        )
        if fit is None:
            self.said.append("Too few attempts ended to fit [cost]: it is the base's.")
            return
        self.said.append(_says(fit))
        if fit.kept:
            return
        for names, error in zip(FACTORS, fit.errors, strict=True):
            remark = "not told alone: the base's, times" if error is None else f"+- {error:.1%}"
            for name in names:
                value, before = getattr(fit.cost, name), getattr(self._base.cost, name)
                if value:
                    times = f"{remark} {value / before:.3g}" if error is None else remark
                    self._put("cost", name, value, times)


def _says(fit: EngineFit) -> str:
    off = f"{fit.off:.1%} off in the median of {fit.attempts} attempts"
    batches = f"Batches of up to {fit.most} sequences occurred; larger ones are extrapolated."
    if fit.kept:
        return f"[cost] is the base's, {off}, which no fit improves. {batches}"
    return f"[cost] is fitted, {off}. {batches}"


def _fit_trainer(
    steps: Sequence[TrainerStep], measured: Any, of_base: float
) -> tuple[float, float, float, float | None]:
    """Seconds per step, seconds per token, and the standard error of both; None: the steps do not
    tell, and the seconds per token are those of the base, or 0."""
    tokens = np.asarray([step.tokens for step in steps], dtype=float)
    spread = float(tokens.std())
    count = len(steps)

    def fixed(per_token: float) -> tuple[float, Any]:
        rest = measured - np.asarray([step.left_s(per_token) for step in steps])
        return float(np.median(rest)), rest

    if count < 3 or spread < _DIFFER * tokens.mean():
        per_token = of_base if fixed(of_base)[0] >= 0 else 0.0
        fixed_s, rest = fixed(per_token)
        return fixed_s, per_token, float(rest.std() / math.sqrt(count)), None
    best, low, high = 0.0, 0.0, 2 * float((measured / tokens).max())
    for _ in range(6):  # each round narrows the bracket to the neighbours of the best
        grid = np.linspace(low, high, 21)
        errors = []
        for per_token in grid:
            fixed_s, rest = fixed(per_token)
            errors.append(float(np.abs(rest - max(0.0, fixed_s)).sum()))
        best, width = float(grid[int(np.argmin(errors))]), float(grid[1] - grid[0])
        low, high = max(0.0, best - width), best + width
    fixed_s, rest = fixed(best)
    fixed_s = max(0.0, fixed_s)
    noise = 1.4826 * float(np.median(np.abs(rest - fixed_s)))
    error = noise / (spread * math.sqrt(count))
    return fixed_s, best, math.hypot(noise / math.sqrt(count), error * tokens.mean()), error


def _numbers(names: Sequence[str]) -> dict[str, int]:
    """The number of each instance: that in the name of a simulated one, else in the order in which
    they joined."""
    of_simulated = {f"instance-{number}": number for number in range(len(names))}
    if set(names) == set(of_simulated):
        return of_simulated
    return {name: number for number, name in enumerate(names)}


def _alike(found: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these are the same faults, in any order."""

    def key(fault: Mapping[str, Any]) -> Any:
        times = (fault["at_s"], fault.get("returns_after_s", 0.0))
        return fault["what"], fault.get("instance", 0), *(round(at, 3) for at in times)

    return sorted(map(key, found)) == sorted(map(key, base))


def _range(values: Sequence[float]) -> str:
    return f"{min(values):,} to {max(values):,}" if len(set(values)) > 1 else "of each"


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _toml(
    head: Sequence[str], tables: Mapping[str, Any], remarks: Mapping[tuple[str, str], str]
) -> str:
    """The file: paragraphs as comments, then the tables with a remark behind each value."""
    lines = [
        line
        for paragraph in head
        for line in textwrap.wrap(paragraph, _WIDTH, initial_indent="# ", subsequent_indent="#   ")
    ]
    lines.append("")
    lines += [f"{name} = {_value(text)}" for name, text in tables.items() if isinstance(text, str)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *_rows(name, table, remarks)]
        elif isinstance(table, list):
            for one in table:
                lines += ["", f"[[{name}]]", *_rows(name, one, remarks)]
    return "\n".join([*lines, ""])


def _rows(name: str, table: Mapping[str, Any], remarks: Mapping[tuple[str, str], str]) -> list[str]:
    rows = []
    for key, value in table.items():
        if value is not None:
            remark = remarks.get((name, key), "")
            rows.append(f"{key} = {_value(value)}" + f"  # {remark}" * bool(remark))
    return rows


def _value(value: Any) -> str:
    """In TOML, where strings, numbers, booleans and arrays are written as in JSON."""
    return json.dumps(value, ensure_ascii=False)
