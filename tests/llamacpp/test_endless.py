"""A real llama.cpp context that is kept in its window. Needs llama-cpp-python, an optional package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gsm.errors import InputError, ModelError
from gsm.integrations.llamacpp import Endless, EndlessOptions, generate_gguf, load_gguf
from gsm.models.sources import demo_gguf_path


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    with pytest.raises(InputError, match=r"is no \.gguf file"):
        load_gguf(tmp_path, 256)
    with pytest.raises(InputError, match="use at least 64"):
        load_gguf(demo_gguf_path(), 8)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    with pytest.raises(ModelError, match=r"pip install 'gsm-infer\[llamacpp\]'"):
        load_gguf(demo_gguf_path(), 256)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = load_gguf(demo_gguf_path(), 256, threads=2)
    yield model
    model.close()


def _tokens(llm: Any, count: int) -> list[int]:
    from pydoc_data.topics import topics

    return list(llm.tokenize(topics["assignment"].encode(), add_bos=False))[:count]


@pytest.mark.parametrize("forget", ["same", "oldest", "half"])
def test_the_window_is_never_exceeded(forget: Any, llm: Any) -> None:
    endless = Endless(llm, EndlessOptions(window_tokens=256, forget=forget))
    endless.reset()
    tokens = _tokens(llm, 700)
    for start in range(0, 700, 50):
        logits = endless.feed(tokens[start : start + 50])
        assert endless.num_held <= 256
        assert np.isfinite(logits).all()
    assert endless.num_seen == 700
    assert endless.num_held + endless.num_forgotten == 700
    assert endless.num_compactions >= 2
    assert llm.input_ids[:4].tolist() == tokens[:4]  # sinks
    assert llm.input_ids[endless.num_held - 50 : endless.num_held].tolist() == tokens[-50:]


def test_saved_keys_have_the_models_shape(llm: Any) -> None:
    endless = Endless(llm, EndlessOptions(window_tokens=256))
    endless.reset()
    endless.feed(_tokens(llm, 100))
    keys = endless.saved_keys(every=1)
    assert keys.positions.tolist() == list(range(100))
    assert [layer.shape for layer in keys.layers] == [(100, 3 * 64)] * 30
    assert all(np.isfinite(layer).all() and layer.std() > 0 for layer in keys.layers)


def test_moved_keys_are_those_of_their_new_position(llm: Any) -> None:
    """Layer 0 keys depend on token and position alone: after a removal they equal those of the shortened text."""
    tokens = _tokens(llm, 120)
    endless = Endless(llm, EndlessOptions(window_tokens=256))
    endless.reset()
    endless.feed(tokens)
    endless._remove([(20, 52)])
    endless.feed([tokens[0]])  # llama.cpp rotates in the next decode
    moved = endless.saved_keys(every=1)
    endless.reset()
    endless.feed([*tokens[:20], *tokens[52:], tokens[0]])
    fresh = endless.saved_keys(every=1)
    assert moved.positions.tolist() == fresh.positions.tolist()
    np.testing.assert_allclose(moved.layers[0], fresh.layers[0], atol=0.05)


def test_protected_text_stays(llm: Any) -> None:
    endless = Endless(llm, EndlessOptions(window_tokens=256, forget="oldest"), num_first=10)
    endless.reset()
    tokens = _tokens(llm, 700)
    endless.feed(tokens[:60])
    endless.protect(20)
    for start in range(60, 700, 40):
        endless.feed(tokens[start : start + 40])
    assert llm.input_ids[:10].tolist() == tokens[:10]
    ((first, last),) = endless.protected
    assert llm.input_ids[first:last].tolist() == tokens[40:60]


def test_generating_past_the_window(llm: Any) -> None:
    pieces: list[str] = []
    result = generate_gguf(
        llm, "Tell a long story.", options=EndlessOptions(window_tokens=256), on_text=pieces.append,
        max_new_tokens=300, chat=False,
    )  # fmt: skip
    assert "".join(pieces) == result.text
    assert result.new_tokens > 0
    assert (result.kv_bytes or 0) > 0
    json.loads(result.model_dump_json())


def test_a_message_that_fills_the_window_is_refused(llm: Any) -> None:
    with pytest.raises(InputError, match="more than half of the window of 256"):
        generate_gguf(
            llm, "word " * 300, options=EndlessOptions(window_tokens=256), on_text=lambda _: None, max_new_tokens=4
        )
