"""A gateway, or its data plane, before the instances that a test names among its fixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integrations.gateway.data_plane.stage import Stage
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.integrations.gateway.scripted import Instance


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "scene(**options): options of the fixture `house` or `stage`"
    )


@pytest.fixture
def instance() -> Upstream:
    return Upstream()


@pytest.fixture
def first() -> Upstream:
    return Upstream("http://a:1")


@pytest.fixture
def second() -> Upstream:
    return Upstream("http://b:1")


@pytest.fixture
def house(request: pytest.FixtureRequest) -> House:
    return House(*_instances(request, Upstream), **_options(request))


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(*_instances(request, Instance), **_options(request))


def _instances(request: pytest.FixtureRequest, make: Callable[[], Any]) -> list[Any]:
    """Those that the test names, or one."""
    names = ("instance", "first", "second")
    named = [request.getfixturevalue(name) for name in names if name in request.fixturenames]
    return named or [make()]


def _options(request: pytest.FixtureRequest) -> dict[str, Any]:
    mark = request.node.get_closest_marker("scene")
    return mark.kwargs if mark else {}
