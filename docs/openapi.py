"""The gateway's HTTP API as OpenAPI, from its routes and the types that their handlers read."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import msgspec

import rollout_sched
from rollout_sched.integrations.gateway.control_plane.app import ACCESS, make_app
from rollout_sched.integrations.gateway.control_plane.auth import Access
from rollout_sched.integrations.vllm.protocol import endpoints

#: Handlers of calls that go to instances, whose API is theirs.
PASSED_ON = ("call", "engine", "engine_of_one", "pass_on", "abort")

#: Calls of the hot path, which has no router: bodies and answers are vLLM's.
GENERATING = (endpoints.CHAT, endpoints.COMPLETIONS, endpoints.GENERATE)


class Route(NamedTuple):
    """`takes`: the type of the body; None without one, or with one that vLLM describes."""

    method: str
    path: str
    access: str
    about: str
    takes: Any = None


def routes() -> Iterator[Route]:
    """All that is not passed on to instances, by access class and path."""
    app = make_app(MagicMock(), MagicMock(), max_body=1, max_samples=1)
    found = [
        Route(
            route.method,
            route.resource.canonical,
            app[ACCESS][route.resource].name.lower(),
            inspect.getdoc(route.handler) or "",
            _taken(route.handler),
        )
        for route in app.router.routes()
        if route.resource is not None
        and route.method not in ("HEAD", "*")
        and route.handler.__name__ not in PASSED_ON
    ]
    found += [
        Route("POST", path, "client", "As vLLM; the request is scheduled.") for path in GENERATING
    ]
    order = [access.name.lower() for access in Access]
    yield from sorted(found, key=lambda each: (order.index(each.access), each.path, each.method))


def _taken(handler: Any) -> Any:
    """The type in its call `read(request, TYPE)`."""
    function = inspect.unwrap(getattr(handler, "__func__", handler))
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "read":
            return eval(ast.unparse(node.args[1]), function.__globals__)
    return None


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    every = list(routes())
    types = list({str(route.takes): route.takes for route in every if route.takes}.values())
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    plain = msgspec.json.encode(components).replace(rb'"\\A', b'"^').replace(rb'\\Z"', b'$"')
    schema_of = dict(zip(map(str, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in every:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollout_sched gateway", "version": rollout_sched.__version__},
        "paths": paths,
        "components": {
            "schemas": {**msgspec.json.decode(plain), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


#: As OpenAI's clients expect it.
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"message": {"type": "string"}}}},
    "required": ["error"],
}


def _operation(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    said: dict[str, Any] = {
        "tags": [route.access],
        "description": route.about,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ],
        "responses": {
            "2XX": {"description": "done, or accepted"},
            "default": {"description": "refused, with the reason", "content": error},
        },
    }
    if route.access != Access.OPEN.name.lower():
        said["security"] = [{"key": []}]
    if route.takes is not None:
        content = {"schema": schema_of[str(route.takes)]}
        said["requestBody"] = {
            "content": {"application/json": content, "application/msgpack": content}
        }
    return said
