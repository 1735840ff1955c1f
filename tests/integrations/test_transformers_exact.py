"""Where GSM promises to change nothing, it changes nothing: tokens and logits of plain transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generation import FULL, SPARSE_ALL, assert_equal_run, given, prompt, run, run_gsm, small, used
from transformers.generation import BaseStreamer

import gsm
from gsm.models import LoadedModel

FAMILIES = ("llama", "qwen3", "qwen2", "mistral", "phi3", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "qwen3_moe")
ARMS = {
    "full": FULL,
    "sparse": SPARSE_ALL,
    "small": small(warm={"codec": "none"}),
    "small sparse": small(warm={"codec": "none"}, sparse={"enabled": True, "budget_tokens": 10_000}),
    "page 1": small(page_size=1, warm={"codec": "none"}),
}


COMBINATIONS = [(f, a) for f in FAMILIES for a in ARMS if f in ("llama", "qwen3") or a in ("full", "small sparse")]


@pytest.mark.parametrize(("family", "arm"), COMBINATIONS)
def test_greedy_equals_plain_transformers(family: str, arm: str, tiny_model: Any) -> None:
    model = tiny_model(family)
    ids = prompt(45)
    assert_equal_run(run_gsm(model, ARMS[arm], ids, 24), run(model, ids, 24))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("arm", ["full", "sparse"])
def test_256_tokens_of_tiny_models(family: str, arm: str, tiny_model: Any) -> None:
    model = tiny_model(family, max_position_embeddings=1024)
    ids = prompt(300)
    assert_equal_run(run_gsm(model, ARMS[arm], ids, 256), run(model, ids, 256))


@pytest.fixture(scope="module")
def plain_demo(demo: LoadedModel, text_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return run(demo.model, text_ids[None, :300], 64)


@pytest.mark.parametrize("arm", ["full", "sparse"])
def test_64_tokens_of_the_demo_model(arm: str, demo: LoadedModel, text_ids: torch.Tensor, plain_demo: Any) -> None:
    assert_equal_run(run_gsm(demo.model, ARMS[arm], text_ids[None, :300], 64), plain_demo)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["full", "sparse"])
def test_256_tokens_of_the_demo_model(arm: str, demo: LoadedModel, text_ids: torch.Tensor) -> None:
    ids = text_ids[None, 5000:6200]
    assert_equal_run(run_gsm(demo.model, ARMS[arm], ids, 256), run(demo.model, ids, 256))


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, None])
def test_prefill_in_chunks(chunk: int | None, tiny_model: Any) -> None:
    model = tiny_model("llama")
    ids = prompt(50)
    config = small(prefill_chunk_tokens=chunk, warm={"codec": "none"})
    assert_equal_run(run_gsm(model, config, ids, 12), run(model, ids, 12))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("sides", [(0, 31), (5, 40), (47, 0)], ids=str)
def test_a_left_padded_batch_equals_each_row_alone(family: str, sides: tuple[int, int], tiny_model: Any) -> None:
    model = tiny_model(family)  # CASES A9; padding longer than a chunk included
    ids, mask = prompt(48, rows=2), torch.ones(2, 48, dtype=torch.long)
    for row, padding in enumerate(sides):
        ids[row, :padding], mask[row, :padding] = 0, 0
    sequences, logits = run_gsm(model, small(warm={"codec": "none"}), ids, 16, attention_mask=mask)
    for row, padding in enumerate(sides):
        alone = run(model, ids[row : row + 1, padding:], 16)
        ours = (sequences[row : row + 1, padding:], logits[row : row + 1])
        assert_equal_run(ours, alone)


@pytest.mark.parametrize("sampling", [{"top_k": 20}, {"top_p": 0.8, "temperature": 1.3}], ids=str)
def test_sampling_with_a_seed(sampling: dict[str, Any], tiny_model: Any) -> None:
    model = tiny_model("llama")
    results = []
    for runner in (run, lambda m, *args, **kw: run_gsm(m, FULL, *args, **kw)):
        torch.manual_seed(11)
        results.append(runner(model, prompt(30, rows=2), 20, do_sample=True, **sampling)[0])
    assert torch.equal(*results)


@pytest.mark.parametrize("beams", [2, 4])
def test_beam_search(beams: int, tiny_model: Any) -> None:
    model = tiny_model("llama")
    ids = prompt(30, rows=2)
    settings = {"max_new_tokens": 16, "num_beams": beams, "num_return_sequences": 2, "do_sample": False}
    plain = model.generate(ids, **settings)
    with gsm.attach(model, small(warm={"codec": "none"})) as handle:
        assert torch.equal(model.generate(ids, **settings), plain)
        handle.cache.manager.check_integrity()
        handle.cache.free()
        assert used(handle.cache) == 0


@pytest.mark.parametrize("arm", ["small", "page 1", "full"])
def test_prompt_lookup_equals_greedy(arm: str, tiny_model: Any) -> None:  # CASES D7
    model = tiny_model("llama")
    ids = prompt(12).repeat(1, 4)  # repetition makes drafts
    plain = run(model, ids, 40)[0]
    with gsm.attach(model, ARMS[arm]) as handle:
        ours = model.generate(ids, max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=5)
        handle.cache.manager.check_integrity()
    assert torch.equal(ours, plain)


def test_prompt_lookup_under_tiers_equals_tiers_without_it(tiny_model: Any) -> None:
    model = tiny_model("llama")
    ids = prompt(12).repeat(1, 4)
    config = small(hot_size=16)
    plain = run_gsm(model, config, ids, 40)[0]
    with gsm.attach(model, config):
        ours = model.generate(ids, max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=5)
    assert torch.equal(ours, plain)


def test_streaming_delivers_every_token_in_order(tiny_model: Any) -> None:
    class Collect(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens.extend(value.flatten().tolist())

        def end(self) -> None:
            self.ended = True

    model, streamer = tiny_model("llama"), Collect()
    with gsm.attach(model, small()):
        out = model.generate(prompt(20), max_new_tokens=15, do_sample=False, streamer=streamer)
    assert streamer.ended
    assert streamer.tokens == out[0].tolist()


def test_a_cache_continues_where_it_stopped(tiny_model: Any) -> None:
    model = tiny_model("llama")
    first, second = prompt(30), prompt(9, seed=4)
    whole = torch.cat((first, second), dim=1)
    plain = run(model, whole, 10)
    config = small(warm={"codec": "none"})
    with gsm.attach(model, config):
        cache = gsm.Cache(model, config)
        model(first, **given(model, cache))
        assert cache.get_seq_length() == 30
        ours = run(model, whole, 10, **given(model, cache))
        twin = cache.fork()
        cache.crop(-9)
        assert (cache.get_seq_length(), twin.get_seq_length()) == (48 - 9, 48)
    assert_equal_run(ours, plain)


def test_a_long_continuation_goes_in_chunks_too(tiny_model: Any) -> None:
    model = tiny_model("llama")
    ids = prompt(90)
    config = small(warm={"codec": "none"})
    for first in (1, 16, 33):
        with gsm.attach(model, config):
            cache = gsm.Cache(model, config)
            run(model, ids[:, :first], 1, **given(model, cache))
            ours = run(model, ids, 8, **given(model, cache))
            assert cache.batch_size == 1
        assert_equal_run(ours, run(model, ids, 8))
