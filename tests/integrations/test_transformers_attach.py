"""The wrapper: what it refuses, what it restores, and that nothing happens by importing it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from generation import FULL, assert_equal_run, given, prompt, run, run_gsm, small, used
from transformers import PreTrainedModel

import gsm
from gsm.config import GsmConfig
from gsm.errors import AttachError, ConfigError, UnsupportedModel
from gsm.smoothing import apply
from gsm.smoothing.int8 import int8_modules


def _state(model: PreTrainedModel) -> tuple[Any, ...]:
    """Everything `attach` touches."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return (
        model.config._attn_implementation,
        model.generation_config.prefill_chunk_size,
        hooks,
        {name: p.data_ptr() for name, p in model.named_parameters()},
    )


@contextmanager
def _failing_at(model: PreTrainedModel, layer: int, error: BaseException) -> Iterator[None]:
    """The MLP of one layer raises, after the layer has written its K and V."""

    def fail(*args: Any) -> None:
        raise error

    hook = model.model.layers[layer].mlp.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def test_the_model_is_restored_after_success(tiny_model: Any) -> None:
    model = tiny_model("llama")
    before, plain = _state(model), run(model, prompt(20), 8)
    run_gsm(model, small(), prompt(20), 8)
    assert _state(model) == before
    assert_equal_run(run(model, prompt(20), 8), plain, tolerance=0.0)


def test_a_smoothing_section_is_applied_and_taken_back(tiny_model: Any) -> None:
    model = tiny_model("llama")
    before = _state(model)
    config = {"smoothing": {"int8": "dynamic"}}
    with gsm.attach(model, config):
        assert int8_modules(model)
    assert _state(model) == before
    assert not int8_modules(model)


def test_a_smoothing_context_outside_is_the_one_in_force(tiny_model: Any) -> None:
    model = tiny_model("llama")
    config = {"smoothing": {"int8": "dynamic"}}
    with apply(model, config):
        inside = int8_modules(model)
        with gsm.attach(model, config):
            assert int8_modules(model) == inside
        assert int8_modules(model) == inside


def test_a_method_that_learns_from_text_asks_for_it(tiny_model: Any) -> None:
    model = tiny_model("llama")
    before = _state(model)
    config = {"smoothing": {"enable": True, "method": "channel"}}
    with pytest.raises(ConfigError, match="pass samples of text"), gsm.attach(model, config):
        pass
    assert _state(model) == before
    with gsm.attach(model, config, samples=prompt(96).view(2, 48)):
        assert _state(model)[-1] != before[-1]  # folded weights
    assert _state(model) == before


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("layer", [0, 2])
def test_the_model_is_restored_after_a_failure(error: BaseException, layer: int, tiny_model: Any) -> None:
    model = tiny_model("llama")
    before, plain = _state(model), run(model, prompt(20), 8)
    with pytest.raises(type(error)), gsm.attach(model, small()), _failing_at(model, layer, error):
        model.generate(prompt(20), max_new_tokens=8)
    assert _state(model) == before
    assert_equal_run(run(model, prompt(20), 8), plain, tolerance=0.0)


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("new_tokens", [1, 7])
def test_a_cache_survives_a_failed_forward_pass(
    error: BaseException, layer: int, new_tokens: int, tiny_model: Any
) -> None:
    model = tiny_model("llama")
    ids, config = prompt(29), small(warm={"codec": "none"})
    expected = model(ids).logits[:, -1]
    with gsm.attach(model, config), torch.inference_mode():
        cache = gsm.Cache(model, config)
        model(ids[:, : 29 - new_tokens], **given(model, cache))
        before = used(cache)
        with pytest.raises(type(error)), _failing_at(model, layer, error):
            model(ids[:, 29 - new_tokens :], **given(model, cache))
        again = model(ids[:, 29 - new_tokens :], **given(model, cache)).logits[:, -1]
        cache.manager.check_integrity()
        cache.crop(-new_tokens)
        assert used(cache) == before
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=0)


def test_pages_come_back_when_the_first_forward_pass_fails(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with gsm.attach(model, small()), torch.inference_mode():
        cache = gsm.Cache(model, small())
        with pytest.raises(ValueError, match="broken"), _failing_at(model, 1, ValueError("broken")):
            model(prompt(20), **given(model, cache))
        cache.manager.check_integrity()
        assert used(cache) == 0
        model(prompt(20), **given(model, cache))
        assert cache.get_seq_length() == 20


def test_pages_come_back_when_a_cache_is_forgotten(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with gsm.attach(model, small()) as handle, torch.inference_mode():
        cache = gsm.Cache(model, small())
        model(prompt(20), **given(model, cache))
        before, twin = used(cache), cache.fork()
        model(prompt(9), **given(model, twin))
        assert used(cache) > before
        handle.cache = None  # it remembers the latest cache
        del twin
        cache.manager.check_integrity()
        assert used(cache) == before


def test_attach_twice_is_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with gsm.attach(model, small()):
        with pytest.raises(AttachError, match="already attached"), gsm.attach(model, FULL):
            pass
        run(model, prompt(10), 4)


def test_a_cache_without_attach_is_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with pytest.raises(AttachError, match="not attached"):
        model(prompt(10), **given(model, gsm.Cache(model)))
    run(model, prompt(10), 4)


def test_other_rows_than_before_are_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with gsm.attach(model), torch.inference_mode():
        cache = gsm.Cache(model)
        model(prompt(10, rows=2), **given(model, cache))
        with pytest.raises(AttachError, match="holds 2 sequences but the input has 3 rows"):
            model(prompt(4, rows=3), **given(model, cache))
        cache.manager.check_integrity()
        assert cache.get_seq_length() == 10


def test_dense_attention_matrices_are_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with gsm.attach(model), torch.inference_mode(), pytest.raises(AttachError, match="output_attentions"):
        model(prompt(10), output_attentions=True)


@pytest.mark.parametrize("family", ["deepseek_v4", "falcon"])
def test_unsupported_models_are_refused_with_the_reason(family: str, tiny_model: Any) -> None:
    model = tiny_model(family)
    before = _state(model)
    with pytest.raises(UnsupportedModel, match=family), gsm.attach(model):
        pass
    assert _state(model) == before


def test_a_bad_config_touches_nothing(tiny_model: Any) -> None:
    model = tiny_model("llama")
    before = _state(model)
    with pytest.raises(ConfigError, match="did you mean 'hot_size'"), gsm.attach(model, {"cache": {"hot_sise": 3}}):
        pass
    assert _state(model) == before


def test_one_config_object_serves_two_models_unchanged(tiny_model: Any) -> None:  # CASES B8
    mapping = small(preset="sparse")
    copy = {"cache": dict(mapping["cache"])}
    config = gsm.load_config(mapping)
    text = config.model_dump_json()
    for source in (mapping, config):
        for family in ("llama", "qwen3"):
            run_gsm(tiny_model(family), source, prompt(30), 6)
    assert mapping == copy
    assert config.model_dump_json() == text
    assert isinstance(config, GsmConfig)


def test_importing_patches_nothing() -> None:
    program = """
import sys
import gsm
assert "torch" not in sys.modules and "transformers" not in sys.modules
import gsm.config, gsm.errors
assert "torch" not in sys.modules
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
before = (sorted(attention.valid_keys()), sorted(masks.valid_keys()))
gsm.attach, gsm.Cache, gsm.load_model
assert (sorted(attention.valid_keys()), sorted(masks.valid_keys())) == before
assert "gsm" not in attention.valid_keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_call_that_keeps_no_cache_is_plain(tiny_model: Any) -> None:
    model = tiny_model("llama")
    expected = model(prompt(20)).logits
    with gsm.attach(model, small()):
        got = model(prompt(20), use_cache=False).logits
        loss = model(prompt(20), labels=prompt(20)).loss  # training-style call: gradients on
        loss.backward()
    torch.testing.assert_close(got, expected)
    assert model.lm_head.weight.grad is not None


def test_threads_do_not_meet(tiny_model: Any) -> None:  # CASES D12
    """Two models with their own configs, and two caches on one of them, all at once, equal solo runs."""
    llama, qwen = tiny_model("llama"), tiny_model("qwen3")
    jobs = [(llama, small(), 1), (llama, small(hot_size=20, page_size=2), 2), (qwen, FULL, 3), (qwen, small(), 4)]
    solo = [run_gsm(model, config, prompt(40, seed=seed), 20)[0] for model, config, seed in jobs]
    together: list[torch.Tensor | None] = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def work(index: int) -> None:
        model, config, seed = jobs[index]
        cache = gsm.Cache(model, config)
        start.wait()
        together[index] = run(model, prompt(40, seed=seed), 20, **given(model, cache))[0]
        cache.manager.check_integrity()

    with gsm.attach(llama, small()), gsm.attach(qwen, FULL):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for ours, alone in zip(together, solo, strict=True):
        assert ours is not None
        assert torch.equal(ours, alone)
