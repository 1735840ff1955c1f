"""Tokenizers and texts for the prompt tests."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from gsm.models.sources import resolve_source

ALPHABETS = (
    "the quick brown fox it's 12,345.67 -- don't\n\n\tindent  double",
    "今天天气很好,我们去公园。東京タワーは高い。한국어 문장",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽🧑🏿‍🚀",
    "e\u0301a\u0308o\u0302\u0323 n\u0303 Zalgo h\u0337\u0322",
    "नमस्ते दुनिया สวัสดี עברית العربية",
    "<|im_start|><|im_end|>\n<|endoftext|><think>x</think>",
    "\x00\x07\u200b\u2028\ufeff\U0010fffd\ue000 \r\n",
)


@cache
def demo_tokenizer() -> Any:
    """The demo model's tokenizer alone: the weights are not needed."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(resolve_source("demo")), local_files_only=True)


def mixed_text(rng: random.Random, num_parts: int) -> str:
    """A text of random stretches of many scripts, special tokens included."""
    parts = []
    for _ in range(num_parts):
        alphabet = rng.choice(ALPHABETS)
        start = rng.randrange(len(alphabet))
        parts.append(alphabet[start : start + rng.randrange(1, 12)])
    return "".join(parts)


def chat(*contents: str, system: str = "You are a helpful assistant.") -> list[dict[str, Any]]:
    """A system prompt, then user and assistant in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns]
