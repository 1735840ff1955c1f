"""The ways people call a model: each works as without GSM, or is refused in one sentence."""

from __future__ import annotations

import importlib
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import FULL, assert_equal_run, given, prompt, run, run_gsm, small
from transformers import DynamicCache, PreTrainedModel, StaticCache, pipeline
from transformers.cache_utils import EncoderDecoderCache

import gsm
from gsm.errors import AttachError, KVError, UnsupportedModel
from gsm.models import LoadedModel

PLAIN = {"warm": {"codec": "none"}}


def test_a_static_cache_is_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with gsm.attach(model):
        with pytest.raises(AttachError, match=r"StaticCache of this call reserves the whole cache beforehand"):
            model.generate(prompt(20), max_new_tokens=4, cache_implementation="static")
        mine = StaticCache(config=model.config, max_cache_len=64)
        with pytest.raises(AttachError, match=r"leave gsm\.attach for that call"), torch.inference_mode():
            model(prompt(20), **given(model, mine))
        run(model, prompt(20), 4)
    assert model.generate(prompt(20), max_new_tokens=4, cache_implementation="static").shape == (1, 24)


def test_an_offloaded_cache_is_refused(tiny_model: Any) -> None:
    cache = DynamicCache()
    cache.offloading = True
    model = tiny_model("llama")
    with (
        gsm.attach(model),
        torch.inference_mode(),
        pytest.raises(AttachError, match="moves the whole cache to the host"),
    ):
        model(prompt(20), **given(model, cache))


def test_an_encoder_decoder_cache_is_refused(tiny_model: Any) -> None:
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    model = tiny_model("llama")
    with gsm.attach(model), torch.inference_mode(), pytest.raises(AttachError, match="manages decoder-only models"):
        model(prompt(20), **given(model, cache))


def test_a_mask_of_four_dimensions_is_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with (
        gsm.attach(model),
        torch.inference_mode(),
        pytest.raises(AttachError, match="mask with 4 dimensions cannot be used"),
    ):
        model(prompt(8), attention_mask=torch.ones(1, 1, 8, 8))


def test_a_mask_with_a_hole_is_refused(tiny_model: Any) -> None:
    model, mask = tiny_model("llama"), torch.ones(1, 8, dtype=torch.long)
    mask[0, 3] = 0
    with gsm.attach(model), torch.inference_mode(), pytest.raises(KVError, match="hole between real tokens"):
        model(prompt(8), attention_mask=mask)


def test_a_call_without_input_is_refused(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with gsm.attach(model), torch.inference_mode(), pytest.raises(AttachError, match="without input_ids"):
        model()


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(AttachError, match="needs a transformers model, not Linear"), gsm.attach(torch.nn.Linear(2, 2)):
        pass


def test_a_users_own_cache_runs_without_gsm_and_says_so(tiny_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, cache = tiny_model("llama"), DynamicCache()
    importlib.import_module("gsm.integrations.transformers.attach")._say_unmanaged.cache_clear()
    with gsm.attach(model) as handle, caplog.at_level(logging.WARNING, logger="gsm"), torch.inference_mode():
        model(prompt(20), **given(model, cache))
        model(prompt(3), **given(model, cache))
        assert handle.cache is None
    assert cache.get_seq_length() == 23
    assert [r.getMessage() for r in caplog.records] == [
        "a DynamicCache was passed in, so this call runs without GSM; pass gsm.Cache(model) instead"
    ]


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_a_call_without_gsm_keeps_the_attention_it_had(family: str, tiny_model: Any) -> None:
    model = tiny_model(family, attn="eager")
    expected = model(prompt(40)).logits
    with gsm.attach(model):
        got = model(prompt(40), use_cache=False).logits
    assert torch.equal(got, expected)


def test_a_default_of_the_checkpoint_does_not_choose_the_cache(tiny_model: Any) -> None:
    """Some checkpoints ship generation settings with a cache of their own."""
    model = tiny_model("gemma2")
    plain = run(model, prompt(40), 6)
    model.generation_config.cache_implementation = "static"
    assert_equal_run(run_gsm(model, FULL, prompt(40), 6), plain)
    assert model.generation_config.cache_implementation == "static"


def test_a_pipeline_inside_attach(demo: LoadedModel) -> None:
    generator = pipeline("text-generation", model=demo.model, tokenizer=demo.tokenizer)
    settings = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    text = "The capital of France is"
    plain = generator(text, **settings)
    with gsm.attach(demo.model, FULL) as handle:
        assert generator(text, **settings) == plain
        assert handle.cache is not None


@pytest.mark.parametrize("offload", [False, True], ids=["one device", "layers on disk"])
def test_models_that_accelerate_dispatched(offload: bool, tmp_path: Path, tiny_model: Any) -> None:
    """device_map wraps forward and moves weights in and out; attach stays outside of that."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model("llama")
    plain = run(model, prompt(40), 8)
    where = {name: "cpu" for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")}
    where |= {f"model.layers.{i}": "disk" if offload and i == 1 else "cpu" for i in range(3)}
    dispatched = accelerate.dispatch_model(
        tiny_model("llama"), where, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )
    assert_equal_run(run_gsm(dispatched, small(**PLAIN), prompt(40), 8), plain)


def test_device_map_auto(tmp_path: Path, tiny_model: Any) -> None:
    pytest.importorskip("accelerate")
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, device_map="auto", dtype=torch.float32).eval()
    assert_equal_run(run_gsm(loaded, small(**PLAIN), prompt(40), 8), run(model, prompt(40), 8))


def test_a_compiled_model_runs_uncompiled_inside_attach(tiny_model: Any) -> None:
    model = tiny_model("llama")
    plain = run(model, prompt(30), 6)
    wrapped: Any = torch.compile(model, backend="eager")
    assert_equal_run(run_gsm(wrapped, small(**PLAIN), prompt(30), 6), plain)
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    assert_equal_run(run_gsm(model, small(**PLAIN), prompt(30), 6), plain)
    assert model._compiled_call_impl is compiled


def test_an_assistant_model_drafts(tiny_model: Any) -> None:
    model, assistant = tiny_model("llama"), tiny_model("llama", seed=1)
    plain = run(model, prompt(30), 24)[0]
    with gsm.attach(model, small(**PLAIN)) as handle:
        ours = model.generate(prompt(30), max_new_tokens=24, do_sample=False, assistant_model=assistant)
        handle.cache.manager.check_integrity()
    assert torch.equal(ours, plain)


def test_several_sequences_are_returned(tiny_model: Any) -> None:
    model = tiny_model("llama")
    torch.manual_seed(3)
    plain = model.generate(prompt(30), max_new_tokens=8, do_sample=True, num_return_sequences=3)
    with gsm.attach(model, small(**PLAIN)):
        torch.manual_seed(3)
        assert torch.equal(model.generate(prompt(30), max_new_tokens=8, do_sample=True, num_return_sequences=3), plain)


def test_two_models_attached_inside_each_other(tiny_model: Any) -> None:
    one, two = tiny_model("llama"), tiny_model("qwen3")
    plain = run(one, prompt(30), 6), run(two, prompt(30), 6)
    with gsm.attach(one, small(**PLAIN)), gsm.attach(two, FULL):
        assert_equal_run(run(one, prompt(30), 6), plain[0])
        assert_equal_run(run(two, prompt(30), 6), plain[1])


def test_only_one_of_two_threads_attaches_a_model(tiny_model: Any) -> None:
    model, start, refused = tiny_model("llama"), threading.Barrier(4), []
    attached: list[PreTrainedModel] = []
    leave = threading.Event()

    def work() -> None:
        start.wait()
        try:
            with gsm.attach(model) as handle:
                attached.append(handle.model)
                leave.wait(30)
        except AttachError as error:
            refused.append(str(error))
        if len(refused) == 3:
            leave.set()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(attached), len(refused)) == (1, 3)
    assert "already attached" in refused[0]
    assert model.config._attn_implementation == "sdpa"


def test_low_bit_keys_in_a_short_window(tiny_model: Any) -> None:  # CASES B5
    """int4 pages where positions leave a window of 10 while 50 tokens are generated."""
    model = tiny_model("mistral", sliding_window=10)
    config = small(warm={"codec": "int4"}, page_size=8, hot_size=8)
    ours, plain = run_gsm(model, config, prompt(30), 50), run(model, prompt(30), 50)
    assert torch.isfinite(ours[1]).all()
    first = (ours[1][:, 0].log_softmax(-1) - plain[1][:, 0].log_softmax(-1)).abs()
    assert float(first.max()) < 1.0


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_what_a_recurrent_state_forbids_is_refused(family: str, tiny_model: Any) -> None:
    model = tiny_model(family)
    with gsm.attach(model, small(**PLAIN)), torch.inference_mode():
        cache = gsm.Cache(model, small(**PLAIN))
        model(prompt(20), **given(model, cache))
        with pytest.raises(KVError, match="cannot take back 3 tokens: a recurrent state cannot be undone"):
            cache.crop(-3)
        twin = cache.fork()
        expected = model(prompt(5, seed=2), **given(model, twin)).logits
        hook = model.model.layers[2].register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            model(prompt(5, seed=3), **given(model, cache))
        hook.remove()
        with pytest.raises(KVError, match="start again with a new cache"):
            model(prompt(5, seed=2), **given(model, cache))
        cache.reset()
        model(prompt(20), **given(model, cache))
        again = model(prompt(5, seed=2), **given(model, cache)).logits
    torch.testing.assert_close(again, expected)


def _fail(*args: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_models_that_compress_their_kv_are_left_alone(family: str, tiny_model: Any) -> None:
    model = tiny_model(family)
    with (
        pytest.raises(UnsupportedModel, match=r"KV tiering is not worth it here, because .*; this helps: "),
        gsm.attach(model),
    ):
        pass
    assert model.config._attn_implementation != "gsm"


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_alibi_is_refused_by_its_row(family: str, tiny_model: Any) -> None:
    with pytest.raises(UnsupportedModel, match=f"{family}: ALiBi biases attention"), gsm.attach(tiny_model(family)):
        pass
