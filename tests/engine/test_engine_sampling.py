"""Sampling, text and stop strings, without a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gsm.engine import SamplingParams
from gsm.engine.detokenize import Detokenizer
from gsm.engine.sampler import SamplerState, sample
from gsm.engine.speculate import PromptLookup
from gsm.errors import InputError
from gsm.models import LoadedModel
from support_engine import load_tiny


def state(index: int = 0, **params: Any) -> SamplerState:
    return SamplerState(SamplingParams(**params), frozenset({0}), [1, 2], index)


LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, -1.0]])


def draws(num: int, **params: Any) -> list[int]:
    one = state(temperature=1.0, seed=1, **params)
    return [sample(LOGITS, [one]).token_ids[0] for _ in range(num)]


def test_frequencies_are_those_of_the_softmax() -> None:
    found = torch.bincount(torch.tensor(draws(4000)), minlength=6) / 4000
    assert torch.allclose(found, LOGITS[0].softmax(-1), atol=0.03)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [({"top_k": 2}, {3, 4}), ({"top_p": 0.6}, {4}), ({"top_p": 0.7}, {3, 4}), ({"min_p": 0.3}, {3, 4})],
    ids=str,
)
def test_cuts(params: dict[str, Any], allowed: set[int]) -> None:
    assert set(draws(200, **params)) == allowed


def test_a_seed_does_not_depend_on_the_company() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    alone = [sample(logits[2:3], [s]).token_ids[0] for s in [state(temperature=1.0, seed=9)] for _ in range(20)]
    states = [state(temperature=t, seed=s) for t, s in ((0.0, 1), (2.0, 3), (1.0, 9), (1.0, None), (0.5, 9))]
    together = [sample(logits, states).token_ids[2] for _ in range(20)]
    assert together == alone


def test_penalties_bias_and_min_tokens() -> None:
    one = state(frequency_penalty=2.0)
    one.note([4, 4])
    assert sample(LOGITS, [one]).token_ids == [3]
    assert sample(LOGITS, [state(logit_bias={5: 100.0})]).token_ids == [5]
    ends = torch.tensor([[9.0, 1.0, 2.0, 3.0, 4.0, -1.0]])
    waiting = state(min_tokens=1)
    assert sample(ends, [waiting]).token_ids == [4]
    waiting.note([4])
    assert sample(ends, [waiting]).token_ids == [0]
    repeated = SamplerState(SamplingParams(repetition_penalty=4.0), frozenset(), [4, 3])
    assert sample(LOGITS, [repeated]).token_ids == [2]


def test_logprobs_are_of_the_model_not_of_the_temperature() -> None:
    found = sample(LOGITS, [state(temperature=0.1, seed=1, logprobs=2)])
    assert found.logprobs is not None
    assert found.top is not None
    expected = LOGITS[0].log_softmax(-1)
    assert found.logprobs[0] == pytest.approx(float(expected[found.token_ids[0]]))
    assert [token for token, _ in found.top[0]] == [4, 3]


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"n": 99},
        {"stop": ("",)},
    ],
    ids=str,
)
def test_impossible_parameters(params: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        SamplingParams(**params)


@pytest.mark.parametrize("stop", [(" w5 w6",), ("6 w7", "w9"), ("5 w6 w7 w8 w9 w1",)], ids=str)
def test_a_stop_string_never_shows(stop: tuple[str, ...], tiny_model: Any) -> None:
    tokenizer = load_tiny(tiny_model("llama")).tokenizer
    ids = [3, 4, 5, 6, 7, 8, 9]
    text = "".join(f" w{i}" for i in ids)
    detokenizer = Detokenizer(tokenizer, [1], stop)
    pieces = [detokenizer.feed([i]) for i in ids] + [detokenizer.finish()]
    ends = [text.index(s) for s in stop if s in text]
    assert "".join(pieces) == text[: min(ends, default=len(text))]
    assert (detokenizer.stop_reason is not None) == bool(ends)


def test_every_cut_of_a_text_gives_the_same_text(demo: LoadedModel) -> None:
    text = "naïve 日本語 👩‍👩‍👧 ok 🇫🇷 \n\n e\u0301"  # CASES E10, C10
    ids = demo.tokenizer(text, add_special_tokens=False)["input_ids"]
    for cut in range(len(ids)):
        detokenizer = Detokenizer(demo.tokenizer, ids[:cut])
        pieces = [detokenizer.feed([i]) for i in ids[cut:]]
        whole = demo.tokenizer.decode(ids[cut:], clean_up_tokenization_spaces=False)
        assert "".join(pieces) + detokenizer.finish() == whole
        if cut == 0:
            assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_become_a_character(demo: LoadedModel) -> None:
    broken = [i for i in range(demo.arch.vocab_size) if demo.tokenizer.decode([i]) == "\ufffd"][:5] * 40
    detokenizer = Detokenizer(demo.tokenizer, [])
    text = "".join(detokenizer.feed([i]) for i in broken) + detokenizer.finish()
    assert text


def test_prompt_lookup() -> None:
    lookup = PromptLookup(4)
    assert lookup.propose([1, 2, 3, 4, 5, 9, 1, 2, 3], 8) == [4, 5, 9, 1]
    assert lookup.propose([1, 2, 3, 4, 5, 9, 1, 2, 3, 7], 8) == []
    assert lookup.propose([1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 2, 3], 1) == [7]
