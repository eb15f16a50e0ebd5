"""What is found out about a server, and what is said about what it lacks."""

from __future__ import annotations

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm.calls import EngineLimits
from rollout_sched.integrations.vllm.control import ControlAnswer, ServerControl
from rollout_sched.integrations.vllm.detection import detect
from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.live.ports import Description, InstanceError
from tests import virtual_net
from tests.integrations.vllm.scripted import METRICS, ScriptedVllm, an_order
from tests.simulators.fake_instance.served import served

DEV_ENDPOINTS = (
    "/abort_requests",
    "/pause",
    "/is_paused",
    "/collective_rpc",
    "/start_weight_update",
    "/update_weight_version",
    "/weight_info",
    "/server_info",
)


def describe(server, **settings):
    async def described():
        async with server.serving():
            instance = HttpInstance(server.url, **settings)
            try:
                return await instance.describe(), instance.findings
            finally:
                await instance.close()

    return virtual_net.run(described())


def test_a_server_with_everything():
    description, findings = describe(ScriptedVllm())
    assert description == Description(
        slots=64,
        kv_tokens=131072,
        max_model_len=8192,
        version=None,
        started_at=1795233930.16,
        model="tiny",
        capabilities=frozenset(
            {"generate", "abort", "pause", "collective_rpc", "weight_transfer", "set_version"}
            | {"weight_info", "weight_versions"}
        ),
        paused=False,
    )
    assert findings.notes == ()
    assert findings.abort_path == "/abort_requests"


def test_finding_out_changes_nothing():
    server = ScriptedVllm()
    describe(server)
    assert server.seen == []


def test_a_version_that_is_a_number():
    server = ScriptedVllm()
    server.weight_version = "17"
    assert describe(server)[0].version == 17


def test_without_scale_out_completions_are_used_and_the_flag_is_named():
    server = ScriptedVllm()
    server.scale_out = False
    description, findings = describe(server)
    assert findings.dialect.capability == "completions"
    assert "weight_versions" not in description.capabilities
    assert len(findings.notes) == 1
    assert "--enable-scale-out" in findings.notes[0]
    with pytest.raises(InstanceError, match=r"403.*--enable-scale-out"):
        describe(server, endpoint="generate")


def test_newer_servers_report_versions_on_request():
    server = ScriptedVllm()
    server.version, server.scale_out = "0.33.0+cpu", False
    description, findings = describe(server)
    assert description.capabilities >= {"weight_versions", "return_weight_versions"}
    assert findings.notes == ()
    assert b'"return_weight_versions":true' in findings.dialect.body(an_order(), "tiny")


def test_without_the_dev_mode_aborts_take_the_open_way():
    server = ScriptedVllm()
    server.missing.update(DEV_ENDPOINTS)
    description, findings = describe(server, slots=8)
    assert (description.slots, description.version) == (8, None)
    assert description.capabilities == {"generate", "abort", "weight_versions"}
    assert findings.abort_path == "/inference/v1/abort_requests"
    assert len(findings.notes) == 4
    assert all("VLLM_SERVER_DEV_MODE=1" in note for note in findings.notes)


def test_without_both_nothing_can_be_aborted():
    server = ScriptedVllm()
    server.scale_out = False
    server.missing.update(DEV_ENDPOINTS)
    description, findings = describe(server, slots=8)
    assert findings.abort_path is None
    assert description.capabilities == {"completions"}
    assert any("not streamed are lost" in note for note in findings.notes)


def test_all_engines_of_an_instance_count():
    server = ScriptedVllm()
    server.metrics += server.metrics.replace('engine="0"', 'engine="1"')
    description, _ = describe(server)
    assert (description.slots, description.kv_tokens) == (128, 262144)


def test_insisting_on_completions():
    description, findings = describe(ScriptedVllm(), endpoint="completions")
    assert findings.dialect.target == "/v1/completions"
    assert findings.notes == ()
    assert "completions" in description.capabilities


def test_the_key_is_used_and_missed():
    server = ScriptedVllm()
    server.api_key = "secret"
    assert describe(server, api_key="secret")[0].model == "tiny"
    with pytest.raises(InstanceError, match=r"401.*API key"):
        describe(server)


def test_a_paused_server_is_detected():
    server = ScriptedVllm()
    server.is_paused = {"is_paused": True}
    assert describe(server)[0].paused is True


def test_a_server_without_pause_state_counts_as_running():
    server = ScriptedVllm()
    server.missing.add("/is_paused")
    description, findings = describe(server)
    assert description.paused is None
    assert "one gateway only" in findings.notes[0]


def test_adapters_are_models_too():
    """vLLM tells no length of theirs."""
    server = ScriptedVllm()
    server.models["data"].append({"id": "tuned", "max_model_len": None, "parent": "tiny"})
    description, _ = describe(server)
    assert (description.model, description.models) == ("tiny", ("tiny", "tuned"))
    assert description.max_model_len == 8192


def test_an_unknown_cache_size_may_be_given():
    server = ScriptedVllm()
    server.metrics = server.metrics.replace("vllm:cache_config_info", "vllm:other")
    with pytest.raises(InstanceError, match=r"it is up, but.*KV cache.*give kv_tokens"):
        describe(server)
    assert describe(server, kv_tokens=5000)[0].kv_tokens == 5000


@pytest.mark.parametrize(
    ("model", "kv", "precision"),
    [
        ({"dtype": "torch.bfloat16"}, "auto", "bfloat16"),
        ({"dtype": "torch.bfloat16", "quantization": None}, "fp8_e4m3", "bfloat16, kv fp8_e4m3"),
        ({"dtype": "torch.bfloat16", "quantization": "fp8"}, "fp8", "fp8"),
        ({"quantization": 'x"\x1b' + "y" * 99}, "auto", "x" + "y" * 39),
        ("text", "fp8", ""),
        (None, "auto", ""),
    ],
)
def test_the_precision_of_weights_and_cache(model: object, kv: str, precision: str) -> None:
    server = ScriptedVllm()
    server.server_info["vllm_config"]["model_config"] = model
    name = "vllm:cache_config_info{"
    server.metrics = server.metrics.replace(name, f'{name}cache_dtype="{kv}",')
    assert describe(server)[0].precision == precision


def info(slots: object) -> dict[str, object]:
    return {"vllm_config": {"scheduler_config": {"max_num_seqs": slots}}}


@pytest.mark.parametrize(
    ("told", "says"),
    [
        *(({"server_info": told}, "give slots") for told in ({}, {"vllm_config": "text"})),
        *(({"server_info": info(slots)}, "give slots") for slots in ("x", 10**30, -4)),
        ({"missing": {"/server_info"}}, r"give slots.*--max-num-seqs"),
        ({"missing": {"/metrics"}}, r"/metrics answered 404.*--disable-log-stats"),
        ({"handlers": {}}, "/v1/models answered 404"),
        *(
            ({"models": models}, "/v1/models")
            for models in ({"data": []}, {"data": [{"id": 3}]}, [], "tiny", None)
        ),
        *(
            ({"models": {"data": [{"id": "tiny", "max_model_len": length}]}}, "/v1/models")
            for length in (-1, 10**30)
        ),
        ({"models": {"data": [{"id": "tiny"}]}}, "max_model_len"),
        *(
            ({"models": {"data": [{"id": name, "max_model_len": 9}]}}, "/v1/models")
            for name in ("a\x1b[2Jb\n", "a" * 1000)
        ),
        ({"metrics": METRICS.replace('"131072"', '"1' + "0" * 30 + '"')}, "KV cache"),
        ({"metrics": METRICS.replace('"131072"', '"-5"')}, "KV cache"),
        ({"metrics": METRICS.replace("1.79523393016e+09", "NaN")}, "/metrics"),
        ({"metrics": METRICS.replace("vllm:kv_cache_usage", "x")}, "no vllm:kv_cache_usage_perc"),
        # Without /update_weight_version, say, tokens would keep the label of a start for ever.
        *(
            ({"failing": {path}}, f"{path} answered 500")
            for path in (
                *("/inference/v1/generate", "/abort_requests", "/pause", "/collective_rpc"),
                *("/update_weight_version", "/weight_info", "/version"),
            )
        ),
    ],
)
def test_impossible_answers_are_refused_with_a_clear_reason(told, says):
    server = ScriptedVllm()
    for attribute, value in told.items():
        setattr(server, attribute, value)
    with pytest.raises(InstanceError, match=says) as caught:
        describe(server)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("settings", [{"slots": 0}, {"slots": -1}, {"kv_tokens": 0}])
def test_sizes_that_cannot_be_given(settings):
    with pytest.raises(CallerError, match="it must be a number from 1 to"):
        HttpInstance("http://h:1", **settings)


class OneFails(ServerControl):
    """Counts the questions that are under way; /pause is answered at once, with a failure."""

    under_way = 0

    async def send(self, method, path, body=None):
        if path == "/pause":
            return ControlAnswer(500, b"it failed")
        self.under_way += 1
        try:
            return await super().send(method, path, body)
        finally:
            self.under_way -= 1


async def test_when_one_question_fails_none_goes_on():
    """Whoever was told may close the connections, or ask anew."""
    async with ScriptedVllm().serving() as server:
        control = OneFails(server.url, [], None, 100, 10.0)
        try:
            with pytest.raises(InstanceError, match="/pause answered 500"):
                await detect(control)
            assert control.under_way == 0
        finally:
            await control.close()


def limits(path_of: str = "") -> EngineLimits:
    async def read() -> EngineLimits:
        async with served() as client:
            instance = HttpInstance(f"http://127.0.0.1:{client.port}{path_of}")
            try:
                return await instance.limits()
            finally:
                await instance.close()

    return virtual_net.run(read())


def test_engine_limits_are_read_in_the_development_mode() -> None:
    assert limits() == EngineLimits(4, True, 512, "0.32.0")


def test_unreported_figures_are_unknown() -> None:
    assert limits("/nowhere") == EngineLimits()
