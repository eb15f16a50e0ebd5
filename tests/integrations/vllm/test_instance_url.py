"""URLs of servers."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.vllm.http_instance import checked_url


@pytest.mark.parametrize(
    ("url", "checked"),
    [
        ("http://gpu-1:8000", "http://gpu-1:8000"),
        ("https://gpu-1/", "https://gpu-1"),
        ("http://[::1]:8000/a/b/", "http://[::1]:8000/a/b"),
    ],
)
def test_a_url_loses_its_last_slash(url, checked):
    assert checked_url(url) == checked


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gpu-1:8000",
        "ftp://gpu-1",
        "http://",
        "http://a:0",
        "http://a:70000",
        "http://a b",
        "http://me:secret@a",
        "http://a?x",
        "http://a#x",
        "http://a\n",
        "http://a/é",
        "http://[::1",
    ],
)
def test_what_cannot_be_called_is_refused_with_the_remedy(url):
    with pytest.raises(CallerError, match="write it as http://host:port"):
        checked_url(url)


@pytest.mark.parametrize("url", ["http://a:8000/v1", "http://a:8000/v1/", "http://a/x/v1"])
def test_the_address_of_a_models_clients_is_named_as_the_mistake_it_is(url):
    with pytest.raises(CallerError, match="leave out /v1"):
        checked_url(url)
