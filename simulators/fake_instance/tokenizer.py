"""Turn text into tokens and back: /tokenize, /detokenize, and a chat's prompt."""

from __future__ import annotations

import msgspec
from aiohttp import web

from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.engine import Engine
from rollout_sched.simulators.fake_instance.protocol import Refusal, decode, reply
from rollout_sched.simulators.fake_instance.requests import Message, prompt_text


class _Tokenize(msgspec.Struct):
    prompt: str | None = None
    messages: list[Message] | None = None


class _Render(msgspec.Struct):
    messages: list[Message]


class _Detokenize(msgspec.Struct):
    tokens: list[int]


class Tokenizer:
    """Endpoints for tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.post("/v1/chat/completions/render", self.render),
        ]

    async def tokenize(self, request: web.Request) -> web.Response:
        body = decode(await request.read(), _Tokenize)
        if body.messages is None and body.prompt is None:
            raise Refusal(400, "either prompt or messages must be given")
        prompt = prompt_text(body.messages) if body.messages is not None else body.prompt
        token_ids = text.encode(prompt or "", self._engine.settings.vocabulary)
        limit = self._engine.settings.spec.max_model_len
        count = len(token_ids)
        return reply(
            {"count": count, "max_model_len": limit, "tokens": token_ids, "token_strs": None}
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        token_ids = decode(await request.read(), _Detokenize).tokens
        return reply({"prompt": text.decode(token_ids)})

    async def render(self, request: web.Request) -> web.Response:
        """A chat as a request of /inference/v1/generate."""
        messages = decode(await request.read(), _Render).messages
        token_ids = text.encode(prompt_text(messages), self._engine.settings.vocabulary)
        model = self._engine.settings.model
        return reply(
            {"model": model, "token_ids": token_ids, "features": None, "sampling_params": {}}
        )
