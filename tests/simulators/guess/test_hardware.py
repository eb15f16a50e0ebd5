"""The tables hold what the formulas need."""

from __future__ import annotations

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.simulators.guess.hardware import gpu_named, gpus, model_named, models


def test_every_gpu_has_all_figures() -> None:
    for name, gpu in gpus().items():
        assert gpu.flops_share[1] > 0, name
        assert gpu.like in ("", *gpus()), name


def test_what_nothing_was_fitted_of_is_like_another() -> None:
    assert gpu_named("H800").bandwidth_share == gpu_named("h100").bandwidth_share


def test_every_model_has_about_the_parameters_of_its_shape() -> None:
    for name, model in models().items():
        embeddings = model.vocabulary * model.hidden * (1 if model.tied else 2)
        layers = 12 * model.layers * model.hidden**2
        assert 0.7 < (model.params - embeddings) / layers < 1.7, name


def test_a_name_with_a_typo() -> None:
    with pytest.raises(CallerError, match='did you mean "h100"'):
        gpu_named("h10")
    with pytest.raises(CallerError, match=r'did you mean "qwen2\.5-7b"'):
        model_named("qwen2-7b")
