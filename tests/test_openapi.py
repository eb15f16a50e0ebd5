"""The HTTP API as OpenAPI, which `make docs` generates."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("openapi", ROOT / "docs/openapi.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Any] = module.document()
    return found


def test_it_is_valid(document: dict[str, Any]) -> None:
    validate(document)


def test_a_body_has_the_schema_that_the_gateway_checks(document: dict[str, Any]) -> None:
    content = document["paths"]["/rollout/v1/groups"]["post"]["requestBody"]["content"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    prompt = {"uid": "a", "prompt_ids": [1, 2], "samples": 4, "max_tokens": 100}
    checker = Draft202012Validator(schema)
    assert checker.is_valid([prompt])
    for wrong in ({"samples": 0}, {"prompt_ids": "hello"}, {"uid": "a\nb"}):
        assert not checker.is_valid([prompt | wrong]), wrong


def test_what_needs_no_key_says_so(document: dict[str, Any]) -> None:
    paths = document["paths"]
    assert "security" not in paths["/health"]["get"]
    for path in ("/v1/chat/completions", "/rollout/v1/batches/next", "/admin/pause"):
        assert paths[path]["post"]["security"] == [{"key": []}]


def test_each_call_has_a_description(document: dict[str, Any]) -> None:
    calls = [call for path in document["paths"].values() for call in path.values()]
    assert all(call["description"] for call in calls)


def test_the_calls_that_the_pages_name_are_in_it(document: dict[str, Any]) -> None:
    named = set()
    for page in ("gateway.md", "client.md", "report_page.md"):
        text = (ROOT / "docs" / page).read_text()
        named |= set(re.findall(r"`(GET|POST|DELETE) (/(?:rollout|admin)/[\w/{}]+)`", text))
    assert len(named) > 5
    known = {
        (method.upper(), re.sub(r"\{\w+\}", "ID", path))
        for path, calls in document["paths"].items()
        for method in calls
    }
    assert {(method, re.sub(r"\{\w+\}", "ID", path)) for method, path in named} <= known
