"""The table of the file, and what is refused of one."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.gateway.control_plane.fanout import read, shipped
from rollout_sched.integrations.gateway.control_plane.weight_protocol import ProtocolStep
from rollout_sched.integrations.vllm.protocol import endpoints

#: What trainers call that must reach every server (vLLM 0.32, prime-rl 2026-08, SkyRL 0.3.0, AReaL
#: 1.0.4).
TO_ALL = """
/pause /resume /sleep /wake_up /reset_prefix_cache /collective_rpc /update_weight_version
/start_weight_update /update_weights /finish_weight_update /v1/load_lora_adapter
/v1/unload_lora_adapter /load_lora_adapter /skyrl/v1/load_lora_adapter /areal_pause_generation
/areal_continue_generation /areal_update_weights /areal_update_weights_xccl
/areal_set_update_weight_meta
"""

WITH_RANKS = """
/init_weight_transfer_engine /init_broadcaster /areal_init_weights_update_group
/init_weights_update_group
"""


@pytest.mark.parametrize("path", TO_ALL.split())
def test_what_changes_a_server_goes_to_all(path: str) -> None:
    rule = shipped().of("POST", path)
    assert rule is not None
    assert rule.to == "all"


@pytest.mark.parametrize("path", WITH_RANKS.split())
def test_what_names_ranks_is_written_anew_for_each(path: str) -> None:
    rule = shipped().of("POST", path)
    assert rule is not None
    assert rule.to == "rewrite"


def test_nothing_that_generates_goes_to_the_whole_fleet() -> None:
    assert not any(path.encode() in endpoints.ENDPOINTS for _, path in shipped().calls)


def test_what_holds_is_undone_by_something_and_asks_those_that_are_away_too() -> None:
    rules = shipped().calls.values()
    assert {rule.pause for rule in rules} == {None, "hold", "release"}
    assert all(rule.away for rule in rules if rule.pause)


@pytest.mark.parametrize(
    ("body", "step"),
    [
        (b'{"method": "reload_weights", "kwargs": {"weights_path": "x"}}', ProtocolStep.WHOLE),
        (b'{"method": "skyrl_start_weight_update"}', ProtocolStep.BEGIN),
        (b'{"method": "update_weights_nccl"}', ProtocolStep.LOAD),
        (b'{"method": "skyrl_finish_weight_update"}', ProtocolStep.FINISH),
        (b'{"method": "sleep"}', None),
        (b'{"method": 7}', None),
        (b"[" * 100_000, None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_a_worker_s_method_says_which_step_it_is(body: bytes, step: ProtocolStep | None) -> None:
    rule = shipped().of("POST", "/collective_rpc")
    assert rule is not None
    assert shipped().step(rule, body) is step


def test_other_calls_are_the_step_that_their_row_says() -> None:
    rule = shipped().of("POST", "/start_weight_update")
    assert rule is not None
    assert shipped().step(rule, b"anything") is ProtocolStep.BEGIN
    assert shipped().of("GET", "/start_weight_update") is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('"POST /x" = { to = "some" }', r"calls\[...\]"),
        ('"POST /x" = { to = "all", colour = "red" }', "colour"),
        ('"POST /x" = { to = "rewrite" }', '"rewrite" needs it'),
        ('"POST /x" = { to = "all", ranks = { first = "a", world = "b" } }', "belongs to"),
        ('"POST /x" = { to = "refuse" }', '"refuse" needs it'),
        ('"POST /x" = { to = "all", because = "so" }', "belongs to"),
        ('"POST /x" = { to = "all", away = true, update = "load" }', "cannot be combined"),
        ('"PUT /x" = { to = "all" }', "'PUT /x'"),
        ('"POST x" = { to = "all" }', "'POST x'"),
        ('"POST /x" = {', "fanout_table.toml"),
    ],
)
def test_a_row_that_cannot_be_is_named(rows: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(f"[calls]\n{rows}\n[rpc]\n")
