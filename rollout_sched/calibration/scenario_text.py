"""Writes a calibration as a scenario file; its header tells how accurate the figures are."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Iterator

from rollout_sched.calibration.calibration import Calibration
from rollout_sched.simulators.replay.scenario import parse_scenario

#: Significant digits of measured values.
_DIGITS = 4
_WIDTH = 100


def scenario_text(found: Calibration, where: str, when: str) -> str:
    """The whole TOML file. `where` and `when`: place and time of the measurement, as text. Raises
    ConfigError if the result is not a valid scenario."""
    header = [line for paragraph in _header(found, where, when) for line in _comment(paragraph)]
    text = "\n".join([*header, "", *_tables(found, where), ""])
    parse_scenario("calibrated", tomllib.loads(text))
    return text


def _header(found: Calibration, where: str, when: str) -> Iterator[str]:
    fit = found.fit
    version = f"vLLM {found.limits.version}" if found.limits.version else "vLLM of unknown version"
    yield f"Calibrated on {where} ({version}, model {found.model}), {when}."
    what = "kinds of steps" if found.in_process else "bursts of requests"
    spread = "unknown, because nothing was measured three times"
    if found.spread is not None:
        spread = f"{found.spread:.1%} (median over all of half the interquartile range)"
    yield (
        f"Fit error {fit.mean_error:.1%} mean, {fit.max_error:.1%} max, over {found.bursts} "
        f"{what} measured {found.measured} times in total; spread {spread}. Measured up to "
        f"{found.context:,} tokens of context in a batch; values beyond are extrapolated."
    )
    if found.writing_s is not None:
        yield (
            f"Outside the engine, and not in the scenario: {fit.call_s * 1e3:.2f} ms per call, "
            f"{found.writing_s * 1e6:.1f} us per answer token (uncomment [links] at the end to "
            "include them, as an HTTP client of this kind sees them)."
        )
    if found.disturbed:
        yield (
            f"{found.disturbed} measurements were thrown away: other requests were served "
            "meanwhile."
        )
    if not found.whole:
        yield "The calibration was stopped early: some bursts were never measured."
    for line in _unknown(found):
        yield f"Not determined: {line}"


def _unknown(found: Calibration) -> Iterator[str]:
    cost = found.fit.cost
    if found.limits.max_num_batched_tokens is None:
        yield "max_num_batched_tokens: vLLM's default is used (VLLM_SERVER_DEV_MODE=1 reports it)."
    if found.limits.block_size is None:
        yield "block_size."
    if found.prefix_caching is None:
        yield "prefix_caching: a repeated prompt was neither counted as cached nor faster."
    if not (cost.step_s and cost.weights_s):
        yield "step_s and weights_s separately: only their sum was measured."
    for name in ("sequence_s", "context_s", "attention_s", "request_s", "prefill_s"):
        if not getattr(cost, name):
            yield f"{name}: too small to measure, or included in another constant."
    yield "the trainer, which is a guess: put in your own values."
    if found.reload_s is None:
        yield "the time to load weights (--weights CHECKPOINT measures it): put in your own value."
    if found.pause_s is None:
        yield "the time of a pause: the server offers none, so updates run under running requests."


def _tables(found: Calibration, where: str) -> Iterator[str]:
    room, cost, fit = found.room, found.fit.cost, found.fit
    count = f"{found.instances} instances" if found.instances > 1 else "one instance"
    yield f"about = {_quoted(f'{found.model} on {where}, {count}.')}"
    error = f"fit error {fit.mean_error:.1%} mean, {fit.max_error:.1%} max"
    yield f"source = {_quoted(f'rollout-sched calibrate: {error}')}"
    yield ""
    yield "[fleet]"
    yield f"instances = {found.instances}"
    yield f"kv_tokens = {room.kv_tokens}"
    if found.limits.block_size is not None:
        yield f"block_size = {found.limits.block_size}"
    yield f"max_num_seqs = {room.slots}"
    yield f"max_num_batched_tokens = {max(found.max_num_batched_tokens, room.slots)}"
    yield f"max_model_len = {room.max_model_len}"
    if found.prefix_caching is not None:
        yield f"prefix_caching = {str(found.prefix_caching).lower()}"
    yield ""
    yield "[cost]"
    for name in cost.__struct_fields__:
        yield f"{name} = {getattr(cost, name):.{_DIGITS}g}"
    yield ""
    yield "[trainer]                       # a guess"
    yield 'placement = "disaggregated"'
    yield "fixed_s = 1.0"
    yield ""
    yield "[weights]"
    pause_s = found.pause_s or 0.0
    if found.reload_s is None:
        yield f"fixed_s = {pause_s:.{_DIGITS}g}  # only a pause and a resume: put in your own value"
    else:
        yield f"fixed_s = {found.reload_s:.{_DIGITS}g}"
    if found.writing_s is not None:
        yield ""
        yield "# [links]"
        yield f"# fronts = {found.instances}"
        yield f"# delay_s = {fit.call_s / 2:.{_DIGITS}g}"
        yield f"# token_s = {found.writing_s:.{_DIGITS}g}"


def _comment(paragraph: str) -> list[str]:
    return textwrap.wrap(
        paragraph, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
    )


def _quoted(text: str) -> str:
    """The text as a TOML basic string."""
    safe = "".join(character if character.isprintable() else " " for character in text)
    escaped = safe.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
