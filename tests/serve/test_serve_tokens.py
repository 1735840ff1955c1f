"""Ids of earlier answers are put back where their text stands, and a cut never changes how the rest is split."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gsm.models import LoadedModel
from gsm.serve.tokens import Tokens

TEXT = "<|im_start|>user\nnaïve 日本語 👩‍👩‍👧 ok?<|im_end|>\n<|im_start|>assistant\nJa, 好 😀!<|im_end|>\n"


@pytest.fixture
def tokens(demo: LoadedModel) -> Iterator[Tokens]:
    found = Tokens(demo)
    yield found
    found.close()


def test_a_cut_at_every_character_gives_the_ids_of_the_whole(tokens: Tokens) -> None:
    whole = tokens._ids(TEXT, False)  # CASES C10
    for cut in range(1, len(TEXT)):
        tokens._known.clear()
        tokens._known["", TEXT[:cut]] = tokens._ids(TEXT[:cut], False)
        assert tokens._encode(TEXT, "", False)[1] == whole


def test_generated_ids_are_put_back_for_their_tenant_alone(tokens: Tokens) -> None:
    prompt = "<|im_start|>assistant\n"
    ids = tokens._ids(prompt, False)
    answer = [token for letter in "hello" for token in tokens._ids(letter, False)]  # not how it would be encoded
    assert answer != tokens._ids("hello", False)
    tokens._remember("a", prompt, ids, answer)
    following = "<|im_end|>\n<|im_start|>user\n"
    expected = [*ids, *answer, *tokens._ids(following, False)]
    assert tokens._encode(f"{prompt}hello{following}", "a", False)[1] == expected
    assert tokens._encode(f"{prompt}hello{following}", "b", False)[1] != expected
    assert tokens._encode(f"{prompt}hello there{following}", "a", False)[1] != expected


def test_half_a_character_is_not_remembered(tokens: Tokens) -> None:
    half = tokens._ids("👩", False)[:1]
    tokens._remember("", "x", tokens._ids("x", False), half)
    assert not tokens._known
