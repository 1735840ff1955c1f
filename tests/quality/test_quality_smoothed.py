"""An arm with both levers: the model is smoothed while a session is open, and the original otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gsm.errors import GsmError
from gsm.measure.bench.arms import make_arm, resolve_arm
from gsm.models import LoadedModel, load_model
from gsm.quality import GsmArm, SmoothedArm
from gsm.smoothing.int8 import int8_modules
from support_measure import save_tiny_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "both.yaml"
    path.write_text(
        "cache: {hot_size: 64, recent_tokens: 32, sparse: {enabled: true, budget_tokens: 80}}\n"
        "smoothing: {enable: true, method: channel, int8: static, calibration_samples: 4, sample_tokens: 64}\n"
    )
    return str(path)


def test_a_config_file_with_both_sections_is_an_arm_with_both_levers(loaded: LoadedModel, config: str) -> None:
    arm = make_arm(resolve_arm(config), loaded, 64)
    assert isinstance(arm, SmoothedArm)
    assert arm.name == config
    ids = torch.randint(5, 40_000, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = loaded.model(input_ids=ids).logits
    for _ in range(2):  # calibration happens once
        with arm.open() as session:
            assert int8_modules(loaded.model)
            session.prefill(ids)
            session.step(ids[:, :1])
            attended = session.stats().attended_tokens_mean
            assert attended is not None
            assert attended <= 80
        assert not int8_modules(loaded.model)
    with torch.no_grad():
        assert torch.equal(loaded.model(input_ids=ids).logits, before)


def test_holding_keeps_the_model_smoothed_between_sessions(loaded: LoadedModel) -> None:
    arm = make_arm(resolve_arm("int8"), loaded, 64)
    assert isinstance(arm, SmoothedArm)
    with arm.hold():
        first = int8_modules(loaded.model)
        for _ in range(2):
            with arm.open() as session:
                session.prefill(torch.arange(10, 30)[None])
            assert [id(module) for module in int8_modules(loaded.model)] == [id(module) for module in first]
    assert not int8_modules(loaded.model)


def test_arms_without_smoothing_are_not_wrapped_and_errors_give_the_model_back(loaded: LoadedModel) -> None:
    assert isinstance(make_arm(resolve_arm("sparse"), loaded, 64), GsmArm)
    arm = make_arm(resolve_arm("int8+sparse"), loaded, 64)
    with pytest.raises(GsmError), arm.open() as session:
        session.prefill(torch.arange(4))
    assert not int8_modules(loaded.model)
