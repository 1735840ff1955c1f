"""What moving coded pages costs: codes written anew at every move, against codes kept and rotated when read.

    python benchmarks/compact_drift.py --json benchmarks/results/compact-drift.json

Keys of 1024 tokens of text are coded, moved 0 to 16 times by 128 positions, and 256 more tokens are scored on them.
"anew" is what `gsm.kv.compact` does; "at read" keeps the codes of the first time and rotates what is read. The error is
that of K, root mean square, relative; KL is against full-precision keys at the same positions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from gsm.arch.rotary import rotary_layouts
from gsm.core.codec import CODECS
from gsm.core.rotary import Rotary
from gsm.integrations.transformers import cache_kwarg
from gsm.models import load_model
from gsm.quality import encode, load_thirds
from gsm.results import collect_environment

PAGE, PAST, SCORED, STEP, FIRST = 16, 1024, 256, 128, 4096


def coded(k: Tensor, v: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """`[1, H, n, d]` through the codec, page by page."""
    pages = [x.reshape(-1, PAGE, x.shape[-1]) for x in (k, v)]
    there = CODECS[codec].decode(CODECS[codec].encode(*pages), torch.float32)
    return tuple(x.view(y.shape) for x, y in zip(there, (k, v), strict=True))  # type: ignore[return-value]


def moved(k: Tensor, v: Tensor, rotary: Rotary, codec: str, moves: int, anew: bool) -> tuple[Tensor, Tensor]:
    """Keys and values as attention reads them after `moves` moves."""

    def turn(keys: Tensor, distance: int) -> Tensor:
        flat = keys.reshape(-1, PAGE, keys.shape[-1])
        return rotary.moved(flat, torch.full((len(flat),), distance)).view(keys.shape)

    if codec == "none":
        return turn(k, -STEP * moves), v
    k, v = coded(k, v, codec)
    if not anew:
        return turn(k, -STEP * moves), v
    for _ in range(moves):
        k, _ = coded(turn(k, -STEP), v, codec)
    return k, v


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", required=True, metavar="FILE")
    arguments = parser.parse_args()
    loaded = load_model("demo", threads=1)
    environment = collect_environment(model=loaded.name, dtype="float32", threads=1)
    ids = encode(loaded.tokenizer, load_thirds().evaluation)[: PAST + SCORED + 1]
    rotary = Rotary(rotary_layouts(loaded.arch)[0].frequencies)
    keyword, rows = cache_kwarg(loaded.model), []
    cache = DynamicCache(config=loaded.model.config)
    positions = torch.arange(FIRST, FIRST + PAST)[None]
    loaded.model(ids[None, :PAST], position_ids=positions, logits_to_keep=1, **{keyword: cache})
    original = [(layer.keys, layer.values) for layer in cache.layers]

    def run(codec: str, moves: int, anew: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        past = DynamicCache()
        keys = []
        for layer, (k, v) in enumerate(original):
            new_k, new_v = moved(k, v, rotary, codec, moves, anew)
            past.update(new_k, new_v, layer)
            keys.append(new_k)
        first = FIRST + PAST - STEP * moves
        place: dict[str, Any] = {"position_ids": torch.arange(first, first + SCORED)[None], keyword: past}
        logits = loaded.model(ids[None, PAST : PAST + SCORED], **place).logits[0].float()
        log_p = logits.log_softmax(-1)
        return log_p, -log_p.gather(-1, ids[PAST + 1 :].unsqueeze(-1)).mean(), keys

    exact, plain, _ = run("none", 0, False)
    for codec in ("int8", "int4"):
        for moves, anew in ((0, True), (1, True), (3, True), (8, True), (16, True), (16, False)):
            log_p, nll, keys = run(codec, moves, anew)
            wanted = [moved(k, v, rotary, "none", moves, False)[0] for k, v in original]
            error = sum(float((a - b).square().sum()) for a, b in zip(keys, wanted, strict=True))
            error /= sum(float(b.square().sum()) for b in wanted)
            row = {"codec": codec, "moves": moves, "codes": "anew" if anew else "at read", "k_error": error**0.5}
            row |= {"kl": float((exact.exp() * (exact - log_p)).sum(-1).mean()), "nll_delta": float(nll - plain)}
            rows.append(row)
            print(row, flush=True)
    record = {"environment": environment.model_dump(mode="json"), "nll": float(plain), "rows": rows}
    Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
