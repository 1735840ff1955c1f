from __future__ import annotations

from pathlib import Path

import pytest

from gsm.errors import ConfigError, InputError
from gsm.measure.bench import ARMS, BenchSpec, resolve_arm, resolve_arms
from gsm.measure.bench.run import _shares_hidden


def test_every_named_arm_has_a_valid_config() -> None:
    for name in ARMS:
        assert resolve_arm(name).name == name
    assert resolve_arm("transformers").config_dict() is None
    assert resolve_arm("full").config.cache.warm.codec == "none"
    assert resolve_arm("tiers").config.cache.warm.codec == "int8"
    assert resolve_arm("sparse").config.cache.sparse.enabled


@pytest.mark.parametrize(
    ("arms", "hidden"),
    [
        (("transformers", "sparse"), True),
        (("transformers", "linear", "sparse"), False),
        (("full", "sparse"), False),
        (("transformers",), False),
    ],
)
def test_a_gain_of_the_linear_layers_must_not_pass_for_the_caches(arms: tuple[str, ...], hidden: bool) -> None:
    assert _shares_hidden(resolve_arms(arms), "cpu") == hidden
    assert not _shares_hidden(resolve_arms(arms), "cuda")


def test_a_config_file_is_an_arm(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("cache: {hot_size: 256}")
    assert resolve_arm(str(path)).config.cache.hot_size == 256


def test_bad_arms_are_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("cache: {hot_sizes: 256}")
    with pytest.raises(InputError, match="did you mean 'sparse'"):
        resolve_arm("sparce")
    with pytest.raises(InputError, match="path of a config file"):
        resolve_arm("zzz")
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_arm("missing.yaml")
    with pytest.raises(ConfigError, match="did you mean 'hot_size'"):
        resolve_arm(str(bad))
    with pytest.raises(InputError, match="given twice"):
        resolve_arms(["full", "full"])
    with pytest.raises(InputError, match="no arm"):
        resolve_arms([])


@pytest.mark.parametrize("name", ["prompt_tokens", "new_tokens", "runs", "batch_size", "chunk_tokens"])
def test_a_size_below_one_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is 0"):
        BenchSpec(**{"model": "demo", "prompt_tokens": 8, name: 0})


def test_a_negative_amount_of_quality_is_refused() -> None:
    with pytest.raises(InputError, match="num_windows is -1"):
        BenchSpec("demo", 8, num_windows=-1)
