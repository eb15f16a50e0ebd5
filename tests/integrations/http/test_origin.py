"""Base URLs, and how the requests to them begin."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.http import Pool
from rollout_sched.integrations.http.client import MAX_OPENINGS, Origin
from tests.integrations.http.wires import client_tls


@pytest.mark.parametrize(
    "url", ["ftp://x", "127.0.0.1:80", "http://", "http://a/?q", "http://u:p@a", "http://a/#f"]
)
def test_a_base_url_is_checked(url):
    with pytest.raises(ValueError, match="URL"):
        Pool(url)


@pytest.mark.parametrize(
    ("url", "host", "port", "secure"),
    [
        ("http://a", "a", 80, False),
        ("https://a", "a", 443, True),
        ("https://[::1]:9/b/", "::1", 9, True),
    ],
)
def test_what_a_base_url_says(url, host, port, secure):
    origin = Origin(url, client_tls() if secure else None)
    assert (origin.host, origin.port, origin.ssl is not None) == (host, port, secure)


def test_its_path_is_put_before_every_target():
    origin = Origin("http://a:9/base/", None)
    for _ in range(2):
        assert origin.opening("GET", "/x?y") == b"GET /base/x?y HTTP/1.1\r\nhost: a:9\r\n"


def test_openings_kept_ready_are_bounded():
    origin = Origin("http://a", None)
    for i in range(MAX_OPENINGS + 5):
        assert origin.opening("GET", f"/{i}").startswith(b"GET /%d " % i)
    assert len(origin._openings) <= MAX_OPENINGS


@pytest.mark.parametrize(
    ("method", "target"),
    [("GET", "/ HTTP/1.1\r\nx: y"), ("GET", "relative"), ("G T", "/"), ("GET", "/a b")],
)
def test_what_makes_no_request_line(method, target):
    with pytest.raises(ValueError, match="request line"):
        Origin("http://a", None).opening(method, target)
