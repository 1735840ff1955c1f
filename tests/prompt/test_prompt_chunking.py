"""Cuts that never change ids (CASES C9, C10)."""

from __future__ import annotations

import random

import pytest
from prompt_cases import demo_tokenizer, mixed_text

from gsm.errors import InputError
from gsm.prompt import chunk, cut
from gsm.prompt.chunking import encode


def test_chunks_joined_are_the_whole_text_and_its_ids() -> None:
    rng = random.Random(0)
    tokenizer = demo_tokenizer()
    for size in (1, 3, 16, 200):
        text = mixed_text(rng, 60)
        chunks = chunk(tokenizer, text, size)
        whole = encode(tokenizer, text)
        assert "".join(text[c.start : c.end] for c in chunks) == text
        assert sum((c.ids for c in chunks), ()) == whole.ids
        assert all(c.ids for c in chunks)
        long = [c for c in chunks if len(c.ids) > size]
        assert all(c.end - c.start <= 2 for c in long), "only a single character may take more than the limit"


def test_every_cut_of_a_mixed_text_keeps_the_ids_or_is_moved() -> None:
    text = "今日は🙂 it's e\u0301t\u00e9 <|im_end|> 12345 👩‍👩‍👧 done"
    tokenizer = demo_tokenizer()
    whole = encode(tokenizer, text).ids
    moved = 0
    for at in range(len(text) + 1):
        place = cut(tokenizer, text, at)
        moved += place != at
        assert encode(tokenizer, text[:place]).ids + encode(tokenizer, text[place:]).ids == whole
    assert 0 < moved < len(text)


def test_a_cut_is_never_inside_a_special_token_or_a_character() -> None:
    tokenizer = demo_tokenizer()
    text = "a<|im_end|>b"
    assert {cut(tokenizer, text, at) for at in range(2, 11)} <= {1, 11}
    emoji = "x👩‍🚀y"
    whole = encode(tokenizer, emoji).ids
    for at in range(len(emoji) + 1):
        place = cut(tokenizer, emoji, at)
        assert encode(tokenizer, emoji[:place]).ids + encode(tokenizer, emoji[place:]).ids == whole


def test_random_cuts() -> None:
    rng = random.Random(1)
    tokenizer = demo_tokenizer()
    for _ in range(60):
        text = mixed_text(rng, 10)
        whole = encode(tokenizer, text).ids
        for _ in range(5):
            place = cut(tokenizer, text, rng.randrange(len(text) + 1))
            assert encode(tokenizer, text[:place]).ids + encode(tokenizer, text[place:]).ids == whole


def test_empty_text_and_wrong_places() -> None:
    tokenizer = demo_tokenizer()
    assert chunk(tokenizer, "", 4) == []
    assert cut(tokenizer, "", 0) == 0
    with pytest.raises(InputError, match="no character 9 in a text of 2"):
        cut(tokenizer, "ab", 9)
    with pytest.raises(InputError, match="at least 1"):
        chunk(tokenizer, "ab", 0)
    with pytest.raises(InputError, match="no valid Unicode at character 1"):
        chunk(tokenizer, "a\ud800", 4)
