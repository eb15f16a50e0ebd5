"""The instances of the data plane's tests are scripted, without a socket."""

from __future__ import annotations

import pytest

from tests.integrations.gateway.scripted import Instance


@pytest.fixture
def instance() -> Instance:
    return Instance()


@pytest.fixture
def first() -> Instance:
    return Instance("i0")


@pytest.fixture
def second() -> Instance:
    return Instance("i1")
