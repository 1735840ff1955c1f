"""Cuts of mixed scripts at random places: both sides, encoded alone, must have the ids of the whole text.

    python benchmarks/prompt_cuts.py --json benchmarks/results/prompt-cuts.json

Texts mix Latin, CJK, emoji sequences, combining marks, right-to-left and Indic scripts, control characters and the
model's special tokens; 10 000 cuts of 1000 texts. Beside it every text goes through `chunk` at four sizes. Tokenizer
only: seconds.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from gsm.models import load_tokenizer
from gsm.prompt import chunk, cut
from gsm.prompt.chunking import encode
from gsm.results import collect_environment

SCRIPTS = (
    "The quick brown fox isn't 12,345.67 km away -- \n\n\tindented  twice; x==y && z",
    "今天天气很好,我们去公园。東京タワーは高いです。한국어 문장도 있다. 「引用」",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈🇩🇪🇫🇷👍🏽🧑🏿‍🚀❤️‍🔥",
    "e\u0301a\u0308o\u0302\u0323 n\u0303 H\u0337\u0322e\u0335 \u1100\u1161\u11a8",
    "नमस्ते दुनिया สวัสดีครับ שלום עולם مرحبا بالعالم Привет Ελληνικά",
    "<|im_start|>user<|im_end|>\n<|endoftext|><think>x</think>",
    "\x00\x07\u200b\u2028\ufeff\U0010fffd\ue000 \r\n\u3000\xa0",
)


def mixed(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randrange(4, 24)):
        script = rng.choice(SCRIPTS)
        start = rng.randrange(len(script))
        parts.append(script[start : start + rng.randrange(1, 16)])
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cuts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", required=True, metavar="FILE")
    arguments = parser.parse_args()
    tokenizer, rng = load_tokenizer(arguments.model), random.Random(arguments.seed)
    counts = {"equal": 0, "moved": 0, "at_an_end": 0, "chunkings": 0, "chunkings_equal": 0}
    naive = 0  # how often cutting at the place itself would have changed ids
    for _ in range(arguments.cuts // 10):
        text = mixed(rng)
        whole = encode(tokenizer, text)
        for _ in range(10):
            at = rng.randrange(len(text) + 1)
            place = cut(tokenizer, text, at)
            sides = encode(tokenizer, text[:place]).ids + encode(tokenizer, text[place:]).ids
            counts["equal"] += sides == whole.ids
            counts["moved"] += place != at
            counts["at_an_end"] += place in (0, len(text))
            naive += encode(tokenizer, text[:at]).ids + encode(tokenizer, text[at:]).ids != whole.ids
        for size in (1, 4, 16, 64):
            chunks = chunk(tokenizer, text, size)
            ids: tuple[int, ...] = sum((c.ids for c in chunks), ())
            spelled = "".join(text[c.start : c.end] for c in chunks)
            counts["chunkings"] += 1
            counts["chunkings_equal"] += ids == whole.ids and spelled == text
    result: dict[str, Any] = {
        "benchmark": "prompt_cuts",
        "command": f"python benchmarks/prompt_cuts.py --json {arguments.json}",
        "cuts": arguments.cuts,
        **counts,
        "changed_without_moving": naive,
        "passed": counts["equal"] == arguments.cuts and counts["chunkings"] == counts["chunkings_equal"],
        "environment": collect_environment(model=arguments.model, dtype="none", device="cpu", threads=1).model_dump(
            mode="json"
        ),
    }
    Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: result[name] for name in (*counts, "changed_without_moving", "passed")}))


if __name__ == "__main__":
    main()
