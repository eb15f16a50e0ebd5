"""What fits where, by the KV cache of instances that are, or were, here."""

from __future__ import annotations

from rollout_sched.core.model.model import Instance
from rollout_sched.core.state.fleet import KvSizes
from tests.core.told import make_request


def instances(*kv_tokens: int) -> list[Instance]:
    return [Instance(f"i{n}", n, 8, size, 0) for n, size in enumerate(kv_tokens)]


def test_nobody_is_here() -> None:
    sizes = KvSizes()
    sizes.measure([])
    assert (sizes.largest, sizes.most, sizes.unlike) == (None, 0, False)


def test_the_largest_is_remembered_when_it_has_gone() -> None:
    sizes = KvSizes()
    small, large = instances(30, 50)
    sizes.measure([small, large])
    assert (sizes.largest, sizes.most, sizes.unlike) == (50, 50, True)
    sizes.measure([small])
    assert (sizes.largest, sizes.most, sizes.unlike) == (30, 50, True)
    sizes.measure([large])
    assert not sizes.unlike


def test_a_request_fits_with_all_that_it_may_become() -> None:
    sizes = KvSizes()
    small, middle, large = instances(30, 110, 500)
    sizes.measure([small, middle, large])
    request = make_request(context_tokens=10)
    assert request.context_tokens + request.remaining_tokens == 110
    assert [sizes.fits(request, each) for each in (small, middle, large)] == [False, True, True]


def test_what_fits_nowhere_goes_where_most_fits() -> None:
    """Its response is cut there; where less fits it would be cut sooner."""
    sizes = KvSizes()
    small, middle = instances(30, 60)
    sizes.measure([small, middle])
    request = make_request(context_tokens=10)
    assert [sizes.fits(request, each) for each in (small, middle)] == [False, True]
