"""Prefix reuse: the same answer from fewer computed tokens, never across tenants, models or settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import PLAIN, SPARSE, config, drain, used_pages

from gsm.config import load_config
from gsm.engine import Engine, SamplingParams
from gsm.engine.prefixes import content_fingerprint, weights_digest
from gsm.errors import ConfigError
from gsm.kv.prefix import chain_hash
from gsm.models import LoadedModel
from support_engine import load_tiny, prompt_ids

NEW = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def tiny(tiny_model: Any) -> LoadedModel:
    return load_tiny(tiny_model("llama"))


def ask(engine: Engine, ids: list[int], salt: str = "", sampling: SamplingParams = NEW) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt were cached."""
    request = engine.add("r", list(ids), sampling, salt=salt)
    return drain(engine)["r", 0].token_ids, request.num_cached_tokens


@pytest.mark.parametrize("cache", [PLAIN, {}, SPARSE], ids=["full", "int8", "sparse"])
def test_three_reuses_of_one_prefix(cache: dict[str, Any], tiny: LoadedModel) -> None:
    common = prompt_ids(50)  # CASES C7
    with Engine(tiny, config(cache)) as engine:
        cold, cached = ask(engine, [*common, 5, 6])
        assert cached == 0
        for _ in range(3):
            warm, cached = ask(engine, [*common, 5, 6])
            assert cached == 48
            if cache is PLAIN:
                assert warm == cold
        other, cached = ask(engine, [*common[:30], 7, 8, 9])
        assert cached == 28
        assert used_pages(engine) == 0
    with Engine(tiny, config(cache)) as engine:
        if cache is PLAIN:
            assert ask(engine, [*common[:30], 7, 8, 9])[0] == other


def test_the_answer_is_part_of_the_next_prefix(tiny: LoadedModel) -> None:
    ids = prompt_ids(30)  # CASES C9
    for cache in (PLAIN, SPARSE):
        with Engine(tiny, config(cache)) as engine:
            answer, _ = ask(engine, ids, sampling=SamplingParams(max_tokens=40))
            _, cached = ask(engine, [*ids, *answer, 3, 4])
            assert cached == (30 + 39) // 4 * 4


def test_what_sparse_decoding_made_is_for_the_same_settings_only(tiny: LoadedModel) -> None:
    from gsm.config import SparseConfig

    ids = prompt_ids(30)
    with Engine(tiny, config(SPARSE)) as engine:
        answer, _ = ask(engine, ids, sampling=SamplingParams(max_tokens=40))
        other = SparseConfig(enabled=True, budget_tokens=24)
        request = engine.add("other", [*ids, *answer], NEW, sparse=other)
        drain(engine)
        assert request.num_cached_tokens == 28  # the prompt alone


def test_salts_and_tenants_never_share(tiny: LoadedModel) -> None:
    ids = prompt_ids(40)
    with Engine(tiny, config()) as engine:
        assert ask(engine, ids, salt="1:ab")[1] == 0
        assert ask(engine, ids, salt="2:ab")[1] == 0
        assert ask(engine, ids, salt="1:ab")[1] == 36


def test_what_changes_a_page_changes_the_fingerprint(tiny: LoadedModel, tiny_model: Any) -> None:
    def of(model: Any, settings: dict[str, Any]) -> str:
        return content_fingerprint(weights_digest(model), load_config(settings))

    base = of(tiny.model, config())  # CASES C2
    assert base == of(tiny.model, config(SPARSE, max_running=2, kv_pages=9))
    other = tiny_model("llama", seed=1)
    changes = [
        of(other, config()),
        of(tiny.model, config({"page_size": 8})),
        of(tiny.model, config({"warm": {"codec": "none"}})),
        of(tiny.model, config({"hot_size": 16})),
        of(tiny.model, config(chunk_tokens=32)),
        of(tiny.model, {**config(), "smoothing": {"int8": "dynamic"}}),
    ]
    assert len({base, *changes}) == len(changes) + 1
    weight = other.model.layers[0].mlp.up_proj.weight
    before = of(other, config())
    weight.data[3, 5] += 0.25
    assert of(other, config()) != before


def test_parts_of_a_key_never_run_together() -> None:
    keys = [("org_1", "2345"), ("org_12345", ""), ("org_1", b"2345"), ("org_1", [2, 3, 4, 5]), ("org_12345",)]
    assert len({chain_hash(*key) for key in keys}) == len(keys)  # CASES C3


def test_names_do_not_depend_on_the_process() -> None:
    code = "from gsm.kv.prefix import chain_hash; print(chain_hash('a', [1, 2], b'x').hex())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {chain_hash("a", [1, 2], b"x").hex().encode() + b"\n"}  # CASES C6


def test_pressure_evicts_the_oldest_and_never_what_runs(tiny: LoadedModel) -> None:
    with Engine(tiny, config(kv_pages=30)) as engine:
        for seed in range(6):
            ask(engine, prompt_ids(40, seed=seed))
        assert engine.prefix is not None
        assert engine.prefix.counters["evicted"] > 0
        assert ask(engine, prompt_ids(40, seed=5))[1] == 36
        assert ask(engine, prompt_ids(40, seed=0))[1] < 36
        assert used_pages(engine) == 0


@pytest.mark.parametrize("cache", [PLAIN, {}], ids=["full", "int8"])
def test_pages_survive_a_restart(cache: dict[str, Any], tiny: LoadedModel, tmp_path: Path) -> None:
    ids = prompt_ids(50)
    with Engine(tiny, config(cache), prefix_dir=tmp_path) as engine:
        ask(engine, ids)
        warm, _ = ask(engine, ids)
    with Engine(tiny, config(cache), prefix_dir=tmp_path) as engine:
        again, cached = ask(engine, ids)
        assert cached == 48
        assert again == warm
        assert used_pages(engine) == 0
    with Engine(tiny, config({**cache, "hot_size": 12}), prefix_dir=tmp_path) as engine:
        assert ask(engine, ids)[1] == 0


def test_a_damaged_file_is_told_and_computed_anew(
    tiny: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt_ids(50)  # CASES C13
    with Engine(tiny, config(PLAIN), prefix_dir=tmp_path) as engine:
        cold, _ = ask(engine, ids)
    files = sorted(tmp_path.rglob("*.page"))
    assert len(files) >= 12
    for file in files:
        file.write_bytes(file.read_bytes()[:-100])
    with Engine(tiny, config(PLAIN), prefix_dir=tmp_path) as engine:
        answer, cached = ask(engine, ids)
        assert (answer, cached) == (cold, 0)
        assert "damaged" in caplog.text
        assert used_pages(engine) == 0
        assert ask(engine, prompt_ids(20, seed=3))[1] == 0


def test_the_directory_stays_below_its_limit(tiny: LoadedModel, tmp_path: Path) -> None:
    with Engine(tiny, config(PLAIN, prefix_disk_mib=0.1), prefix_dir=tmp_path) as engine:
        for seed in range(5):
            ask(engine, prompt_ids(60, seed=seed))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.page")) <= 0.1 * 2**20


def test_an_impossible_directory_is_refused(tiny: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="prefix directory"):
        Engine(tiny, config(), prefix_dir=tmp_path / "file")
    with pytest.raises(ConfigError, match="prefix"):
        Engine(tiny, config({"policy": "recent", "cold": "drop"}), prefix_dir=tmp_path)
