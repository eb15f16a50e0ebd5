"""A vLLM server behind the port, against a server that does what it is told to, or lies."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm.control import KEEP_ALIVE_S
from rollout_sched.integrations.vllm.http_instance import HttpInstance, checked_url
from rollout_sched.live.ports import AnswerUntrue, InstanceError, RequestRejected, WeightsUnknown
from tests import virtual_net
from tests.integrations.vllm.scripted import ScriptedVllm, an_order, completed, event, generated

GENERATE = "/inference/v1/generate"


@asynccontextmanager
async def joined(server=None, **settings):
    """(a described instance, its server)"""
    server = server or ScriptedVllm()
    async with server.serving():
        instance = HttpInstance(server.url, **settings)
        await instance.describe()
        try:
            yield instance, server
        finally:
            await instance.close()


@pytest.fixture
def server():
    return ScriptedVllm()


@pytest.fixture
@asynccontextmanager
async def instance(server):
    async with joined(server) as (made, _):
        yield made


def without_abort():
    server = ScriptedVllm()
    server.scale_out = False
    server.missing.add("/abort_requests")
    return server


def generate_against(script, order=None, **settings):
    """What becomes of an order when the server does as `script(server)` says."""

    async def generate():
        async with joined(**settings) as (instance, server):
            script(server)
            return await asyncio.wait_for(instance.generate(order or an_order()), 10)

    return virtual_net.run(generate())


def test_an_answer():
    output = generate_against(
        lambda s: s.answer(GENERATE, generated([10, 11], "stop", [("4", 0, 2)]))
    )
    assert (output.token_ids, output.logprobs) == ([10, 11], [-0.5, -1.5])
    assert (output.finish, output.spans) == ("stop", ((4, 2),))


def test_through_completions():
    output = generate_against(lambda s: None, endpoint="completions")
    assert (output.token_ids, output.finish, output.spans) == ([10, 11, 12, 13], "length", ())


async def test_the_order_arrives_as_it_was_given():
    async with joined() as (instance, server):
        await instance.generate(an_order("x", session="s1"))
        ((path, body),) = server.seen
    assert (path, body["request_id"], body["cache_salt"]) == (GENERATE, "x", "3")


async def test_the_session_is_a_header_and_cannot_be_two(instance, server):
    got = []

    async def handler(request):
        got.append(request.headers.get("X-Session-ID"))
        return web.json_response(generated([10], "stop"))

    server.handlers["POST", GENERATE] = handler
    await instance.generate(an_order(session="s 1"))
    await instance.generate(an_order())
    with pytest.raises(RequestRejected, match="session"):
        await instance.generate(an_order(session="a\r\nX-Evil: 1"))
    assert got == ["s 1", None]


async def test_a_stream_is_handed_on_as_it_comes():
    gate = asyncio.Event()
    got = []

    def on_tokens(tokens, logprobs):
        got.append((list(tokens), list(logprobs)))
        if len(got) == 2:
            gate.set()  # the rest comes only when this has arrived

    async with joined() as (instance, server):
        chunks = [
            generated([10], None),
            generated([11, 12], None),
            generated([13], "length", [("4", 0, 3), ("5", 3, 4)]),
            {"choices": [], "usage": {}},
            b"data: [DONE]\n\n",
        ]
        server.stream(GENERATE, chunks, gate)
        output = await asyncio.wait_for(instance.generate(an_order(stream_every=2), on_tokens), 10)
        got, output, body = got, output, server.seen[0][1]
    assert got == [([10], [-0.5]), ([11, 12], [-1.5, -0.5])], "the last come with the end"
    assert output.token_ids == [10, 11, 12, 13]
    assert (output.finish, output.spans) == ("length", ((4, 3), (5, 1)))
    assert body["sampling_params"]["stream_interval"] == 2


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_at_fault_is_rejected_with_the_answer(status):
    with pytest.raises(RequestRejected, match="out of vocabulary") as caught:
        generate_against(lambda s: s.answer(GENERATE, b'{"error": "out of vocabulary"}', status))
    assert (caught.value.status, caught.value.body) == (status, b'{"error": "out of vocabulary"}')


@pytest.mark.parametrize(
    ("status", "says"),
    [(401, "API key"), (403, "--enable-scale-out"), (404, "404"), (301, "301"), (204, "204")]
    + [(status, str(status)) for status in (429, 500, 502, 503)],
)
@pytest.mark.parametrize("stream_every", [0, 8])
def test_any_other_status_is_the_instances_fault(status, says, stream_every):
    with pytest.raises(InstanceError, match=says):
        generate_against(
            lambda s: s.answer(GENERATE, b"", status), an_order(stream_every=stream_every)
        )


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [b"data: [DONE]\n\n"],
        [b"garbage\n\n"],
        [b"data: garbage\n\n"],
        [generated([10], None)],
        [generated([10], None), event(generated([11], "stop"))[:-40]],
        [generated([10], "stop"), generated([11], "stop")],
        [generated([10, 11, 12], None), generated([13, 14], None)],
    ],
)
def test_a_stream_that_cannot_be_true(chunks):
    with pytest.raises(InstanceError):
        generate_against(lambda s: s.stream(GENERATE, chunks), an_order(stream_every=1))


@pytest.mark.parametrize(
    ("chunks", "kind"),
    [
        ([generated([10], None)], InstanceError),
        ([generated([10], None), {"error": {"message": "EngineCore died"}}], InstanceError),
        ([generated([10], "stop"), generated([11], "stop")], AnswerUntrue),
        ([generated([10], None), b"data: garbage\n\n"], AnswerUntrue),
    ],
)
def test_tokens_before_a_break_are_kept_and_before_a_lie_are_not(chunks, kind):
    with pytest.raises(InstanceError) as caught:
        generate_against(lambda s: s.stream(GENERATE, chunks), an_order(stream_every=1))
    assert type(caught.value) is kind


def test_an_answer_without_end_is_not_kept():
    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 2**16)

    def script(server):
        server.handlers["POST", GENERATE] = endless

    with pytest.raises(InstanceError, match="too large"):
        generate_against(script)


def test_a_connection_that_breaks_is_never_tried_again():
    calls = []

    def script(server):
        async def reset(request):
            calls.append(request.path)
            request.transport.abort()
            return web.Response()

        server.handlers["POST", GENERATE] = reset

    with pytest.raises(InstanceError, match=f"{GENERATE} failed"):
        generate_against(script)
    assert calls == [GENERATE]


def test_an_attempt_can_have_a_limit():
    def script(server):
        server.stream(GENERATE, [generated([10], "stop")], asyncio.Event())

    with pytest.raises(InstanceError, match=r"did not answer within 0\.05 s"):
        generate_against(script, answer_limit_s=0.05)


def test_aborts_carry_the_engines_ids_in_one_call():
    async def aborts(endpoint):
        async with joined(endpoint=endpoint) as (instance, server):
            await asyncio.gather(instance.abort("a"), instance.abort("b"))
            return server.seen

    path = "/abort_requests"
    assert virtual_net.run(aborts("generate")) == [
        (path, {"request_ids": ["generate-tokens-a", "generate-tokens-b"]})
    ]
    assert virtual_net.run(aborts("completions")) == [
        (path, {"request_ids": ["cmpl-a-0", "cmpl-b-0"]})
    ]


async def test_without_aborts_the_connection_is_cut():
    first = asyncio.Event()
    async with joined(without_abort()) as (instance, server):

        async def handler(request):
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(event(completed([10, 11], None)))
            await asyncio.Event().wait()

        server.handlers["POST", "/v1/completions"] = handler
        order = an_order(stream_every=2)
        attempt = asyncio.create_task(instance.generate(order, lambda *_: first.set()))
        await asyncio.wait_for(first.wait(), 10)
        await instance.abort("somebody else")
        await instance.abort("a")
        output = await asyncio.wait_for(attempt, 10)
    assert (output.token_ids, output.logprobs) == ([10, 11], [-0.5, -1.5])
    assert (output.finish, output.spans) == ("abort", ())


@pytest.mark.parametrize("server", [ScriptedVllm, without_abort])
async def test_cancelling_an_attempt_closes_its_connection(server):
    there, gone = asyncio.Event(), asyncio.Event()
    async with joined(server()) as (instance, scripted):

        async def handler(request):
            there.set()
            try:
                await asyncio.Event().wait()
            finally:  # aiohttp's test server cancels the handler of a connection that closes
                gone.set()

        scripted.handlers["POST", instance.findings.dialect.target] = handler
        attempt = asyncio.create_task(instance.generate(an_order()))
        await asyncio.wait_for(there.wait(), 10)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        await asyncio.wait_for(gone.wait(), 10)


async def test_clear_cache_is_always_said(instance, server):
    await instance.pause("keep", clear_cache=False)
    await instance.pause("abort", clear_cache=True)
    await instance.resume()
    await instance.set_version(7)
    assert server.seen == [
        ("/pause", {"mode": "keep", "clear_cache": "false"}),
        ("/pause", {"mode": "abort", "clear_cache": "true"}),
        ("/resume", {}),
        ("/update_weight_version", {"new_version": "7"}),
    ]


async def test_a_label_is_left_out_where_it_is_not_offered():
    server = ScriptedVllm()
    server.missing.add("/update_weight_version")
    async with joined(server) as (instance, _):
        await instance.set_version(7)
        assert server.seen == []


@pytest.mark.parametrize("told", ["default", "0"])
@pytest.mark.parametrize("stream_every", [0, 2])
async def test_an_answer_with_the_label_of_a_start_is_not_believed_once_there_is_another(
    told, stream_every
):
    """The server was restarted, and nobody has noticed yet."""
    server = ScriptedVllm()
    server.weight_version = told
    answer = generated([10, 11], "stop", [("default", 0, 2)])
    server.answer(GENERATE, event(answer) if stream_every else answer)
    async with joined(server) as (instance, _):
        if told == "default":
            output = await instance.generate(an_order("a", stream_every=stream_every))
            assert output.spans == ()
            await instance.set_version(0)
        with pytest.raises(WeightsUnknown):
            await instance.generate(an_order("b", stream_every=stream_every))


@pytest.mark.parametrize("missing", ["/update_weight_version", "/version"])
async def test_labels_say_nothing_where_they_are_not_offered(missing):
    server = ScriptedVllm()
    server.missing.add(missing)
    async with joined(server) as (instance, _):
        await instance.set_version(0)
        assert (await instance.generate(an_order())).spans == ()


async def test_weight_calls_pass_their_answer_on(instance, server):
    await instance.collective_rpc("reload_weights", {"weights_path": "w"})
    server.answer("/update_weights", b"torn", 500)
    with pytest.raises(InstanceError, match="/update_weights answered 500: torn"):
        await instance.weight_transfer("update_weights", {"update_info": {"a": 1}})
    assert server.seen == [
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "w"}}),
        ("/update_weights", {"update_info": {"a": 1}}),
    ]


async def test_load():
    async with joined() as (instance, server):
        gauges = await instance.gauges()
        server.missing.add("/metrics")
        with pytest.raises(InstanceError, match="404"):
            await instance.gauges()
    assert (gauges.running, gauges.waiting, gauges.generated_tokens) == (3, 2, 749)


async def test_the_key_goes_with_every_order():
    server = ScriptedVllm()
    server.api_key = "secret"
    async with joined(server, api_key="secret") as (instance, _):
        assert (await instance.generate(an_order())).finish == "length"


def test_an_instance_must_be_described_first():
    instance = HttpInstance("http://127.0.0.1:1")
    with pytest.raises(CallerError, match="describe"):
        virtual_net.run(instance.generate(an_order()))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://host/?a=1",
        "http://host/#a",
        "http://host:99999",
        "http://host:0",
        "http://user@host",
        "http://user:password@host",
        "http://@host",
        "http://host?",
        "http://host#",
        "http://host:1/\r\nX-Evil: 1",
        "http://host:1\n",
        "http://ho\tst:1",
        " http://host:1",
        "http://host:1 ",
        "http://ho st:1",
        "http://host\\@other:1",
        "http://host\x00:1",
        "http://[::1",
        "http://höst:1",
        "http://a/é",
    ],
)
def test_an_uncallable_url_is_refused_with_a_remedy(url):
    with pytest.raises(CallerError, match="write it as http://host:port") as caught:
        HttpInstance(url)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "url", ["http://h", "https://h-1.x:9/", "http://[::1]:80/a/b", "http://10.0.0.1:1"]
)
def test_a_url_loses_its_last_slash(url):
    assert HttpInstance(url).name == url.rstrip("/")


async def test_the_wanted_one_of_several_models_is_named():
    server = ScriptedVllm()
    server.models["data"].append({"id": "tuned", "max_model_len": None})

    async def asked(instance):
        await instance.generate(an_order())
        instance.use_model("tuned")
        await instance.generate(an_order())
        instance.use_model("another")
        await instance.generate(an_order())

    async with server.serving():
        instance = HttpInstance(server.url)
        await instance.describe()
        await asked(instance)
        await instance.close()
    assert [body["model"] for _, body in server.seen] == ["tiny", "tuned", "tiny"]


async def test_a_servers_error_is_one_short_line():
    server = ScriptedVllm()
    server.answer("/inference/v1/generate", b"no\r\n\x1b[2J" + b"x" * 5000, 500)
    async with server.serving():
        instance = HttpInstance(server.url)
        await instance.describe()
        with pytest.raises(InstanceError) as caught:
            await instance.generate(an_order())
        await instance.close()
        said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 400


@pytest.mark.parametrize("key", ["", "a\nb", "schlüssel"])
def test_a_key_that_cannot_be_sent(key):
    with pytest.raises(CallerError, match="API key") as caught:
        HttpInstance("http://127.0.0.1:1", api_key=key)
    assert not key or key not in str(caught.value)


def test_request_names_are_unique_and_legible():
    assert HttpInstance("http://127.0.0.1:1/").name == "http://127.0.0.1:1"
    assert HttpInstance("http://127.0.0.1:1/", name="a").name == "a"


def test_many_at_once():
    async def lengths():
        async with joined() as (instance, _):
            orders = [an_order(str(i), 1 + i % 7) for i in range(100)]
            outputs = await asyncio.gather(*(instance.generate(order) for order in orders))
            return [len(output.token_ids) for output in outputs]

    assert virtual_net.run(lengths()) == [1 + i % 7 for i in range(100)]


def test_connections_are_kept_for_less_long_than_vllm_keeps_them():
    assert 0 < KEEP_ALIVE_S < 5.0  # uvicorn's default, which vLLM keeps


async def test_callback_exceptions_propagate(instance, server):
    def on_tokens(tokens, logprobs):
        raise ZeroDivisionError

    server.stream(GENERATE, [generated([10], None), generated([11], "stop")])
    with pytest.raises(ZeroDivisionError):
        await instance.generate(an_order(stream_every=1), on_tokens)


@pytest.mark.parametrize("setting", ["logprobs", "prompt_logprobs"])
def test_a_number_of_logprobs_that_is_none(setting):
    with pytest.raises(RequestRejected, match=f"{setting} is 'many'"):
        generate_against(lambda s: None, an_order(sampling={setting: "many"}))


def test_log_probs_of_the_whole_vocabulary_make_a_long_answer():
    answer = generated([10], "stop")
    answer["padding"] = "x" * 2**23
    order = an_order(sampling={"logprobs": -1})
    assert generate_against(lambda s: s.answer(GENERATE, answer), order).token_ids == [10]
    with pytest.raises(InstanceError, match="too large"):
        generate_against(lambda s: s.answer(GENERATE, answer))


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (200, b'{"world_size": 4}', 4),
        (404, b"{}", "VLLM_SERVER_DEV_MODE=1"),
        (200, b'{"world_size": 0}', "gave an unexpected answer"),
        (200, b'{"world_size": true}', "gave an unexpected answer"),
        (200, b"four", "gave an unexpected answer"),
    ],
)
async def test_the_world_size_is_asked_for(status, body, told, instance, server):
    async def answer(request):
        return web.Response(body=body, status=status)

    server.handlers["GET", "/get_world_size"] = answer
    if isinstance(told, int):
        assert await instance.world_size() == told
    else:
        with pytest.raises(InstanceError, match=told):
            await instance.world_size()


@pytest.mark.parametrize("url", ["http://a:8000/v1", "http://a:8000/v1/", "http://a/x/v1"])
def test_the_address_of_a_models_clients_is_named_as_the_mistake_it_is(url):
    with pytest.raises(CallerError, match="leave out /v1"):
        checked_url(url)
