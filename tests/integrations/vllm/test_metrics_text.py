"""Figures found in the text of /metrics."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.vllm import metrics_text
from rollout_sched.live.ports import Gauges, InstanceError
from tests.integrations.vllm.scripted import METRICS

TEXT = METRICS.encode()
TWO_ENGINES = TEXT + TEXT.replace(b'engine="0"', b'engine="1"').replace(b"0.25", b"0.75")


def test_load_and_counters():
    assert metrics_text.gauges(TEXT) == Gauges(
        running=3,
        waiting=2,
        kv_usage=0.25,
        preemptions=7,
        prefill_tokens=622,
        cached_tokens=288,
        generated_tokens=749,
        started_at=1795233930.16,
        drafts=30,
        drafted_tokens=90,
        accepted_tokens=60,
    )


def test_engines_are_added_up_and_their_usage_averaged():
    both = metrics_text.gauges(TWO_ENGINES)
    assert (both.running, both.waiting, both.kv_usage, both.prefill_tokens) == (6, 4, 0.5, 1244)


def test_the_cache_is_that_of_all_engines():
    assert metrics_text.cache_config(TEXT) == metrics_text.CacheConfig(1, 131072)
    assert metrics_text.cache_config(TWO_ENGINES) == metrics_text.CacheConfig(2, 262144)


def test_without_a_size_in_tokens_the_blocks_count_which_vllm_has_added_up():
    older = TWO_ENGINES.replace(b'kv_cache_size_tokens="131072"', b'kv_cache_size_tokens="None"')
    assert metrics_text.cache_config(older).kv_tokens == 4096 * 32


def test_a_metric_is_found_first_last_and_without_labels():
    text = b'a 1\na_b 2\n# a 3\nba 4\na{x="y z"} 5\na 6'
    assert [value for _, value in metrics_text.samples(text, "a")] == [1, 5, 6]


def test_the_start_of_the_process():
    assert metrics_text.started_at(TEXT) == 1795233930.16
    assert metrics_text.started_at(b"") == 0


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html></html>",
        TEXT.replace(b" 3.0", b" many"),
        TEXT.replace(b" 3.0", b" NaN"),
        TEXT.replace(b" 7.0", b" +Inf"),
        TEXT.replace(b" 7.0", b" 1e300"),
        TEXT.replace(b" 3.0", b" -3.0"),
        TEXT + b"vllm:num_requests_running 1\n" * 100_000,
        TEXT + b"# vllm:num_requests_running 1\n" * 100_000,
    ],
)
def test_a_text_that_is_no_load_is_refused(text):
    with pytest.raises(InstanceError, match="/metrics"):
        metrics_text.gauges(text)


@pytest.mark.parametrize(
    "gauge",
    [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    ],
)
def test_a_missing_gauge_is_named(gauge):
    """The instance joined, and was lost at its first poll, for ever."""
    with pytest.raises(InstanceError, match=f"{gauge}: use a vLLM that reports it"):
        metrics_text.gauges(TEXT.replace(b"%b{" % gauge.encode(), b"vllm:other{"))


@pytest.mark.parametrize("text", [b"", TEXT.replace(b'"32"', b'"x"'), TEXT.replace(b'"32"', b'""')])
def test_a_missing_cache_size_is_refused(text):
    with pytest.raises(InstanceError, match=r"it is up, but.*KV cache.*give kv_tokens"):
        metrics_text.cache_config(text)
    assert metrics_text.cache_config(text, 5000).kv_tokens == 5000


def test_a_cache_is_never_more_than_full():
    assert metrics_text.gauges(TEXT.replace(b" 0.25", b" 40.0")).kv_usage == 1.0
