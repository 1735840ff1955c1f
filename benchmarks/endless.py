"""Quality, memory and time of a session that never ends: 50 000 tokens of text through a window of 6000.

    python benchmarks/endless.py --json benchmarks/results/endless.json

The text is fed in chunks, each followed by what a session does after it: commit, forget, compact. At every mark the
next 2048 tokens are scored (16 windows of 128) and compared, token by token, with plain transformers that starts anew
on as many tokens before the mark as the session keeps (and again every --fresh-every tokens, lest it sees far more).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import DynamicCache

import gsm
from gsm.integrations.transformers import cache_kwarg
from gsm.models import load_model
from gsm.quality import encode, load_thirds
from gsm.results import collect_environment
from gsm.stats import bootstrap_mean_ci

CHUNK, WINDOW, DECODED, TRACED = 256, 128, 32, 2048
POLICY = {"policy": "recent", "cold": "drop", "prefill_chunk_tokens": CHUNK}


def arm_config(arm: str, kept: int, positions: str) -> dict[str, Any]:
    """Sinks and the last `kept` tokens: all in full precision, or all but the last 512 as codes."""
    sizes = {"hot_size": kept} if arm == "fp" else {"hot_size": 512, "warm_size": kept - 512}
    codec = "none" if arm == "fp" else arm
    return {"cache": {**POLICY, "positions": positions, **sizes, "warm": {"codec": codec}}}


@torch.inference_mode()
def feed(model: Any, cache: Any, ids: Tensor, following: Tensor | None) -> list[float]:
    """Feed `ids [n]`; the negative log-likelihood of the `following [n]` tokens, if they are given."""
    kwargs = {cache_kwarg(model): cache, "use_cache": True}
    logits = model(input_ids=ids[None], logits_to_keep=0 if following is not None else 1, **kwargs).logits[0]
    if following is None:
        return []
    return torch.nn.functional.cross_entropy(logits.float(), following, reduction="none").tolist()


class Session:
    """One session over the whole text. After every mark the first tokens take the decode path, the rest chunks."""

    def __init__(self, loaded: Any, ids: Tensor, config: dict[str, Any], limit: int | None) -> None:
        self.model, self.ids, self.config = loaded.model, ids, config
        self.cache = gsm.Cache(loaded.model, config)
        self.compactor = self.cache.manager.compactor
        if self.compactor is not None and limit is not None:
            self.compactor.limit = limit
        self.place = self.traced = 0
        self.trace: list[dict[str, Any]] = []

    def advance(self, stop: int) -> None:
        """Feed the text up to `stop`."""
        with gsm.attach(self.model, self.config):
            while self.place < stop:
                last = min(self.place + CHUNK, stop)
                start = time.perf_counter()
                feed(self.model, self.cache, self.ids[self.place : last], None)
                if last >= self.traced + TRACED and last - self.place == CHUNK:
                    self._note(last, time.perf_counter() - start)
                self.place = last

    def score(self, num_tokens: int) -> tuple[list[float], list[float]]:
        """Negative log-likelihoods of the next tokens, and milliseconds of those that were decoded."""
        nll, decode_ms, end = [], [], self.place + num_tokens
        with gsm.attach(self.model, self.config):
            while self.place < end:
                decodes = len(decode_ms) < DECODED
                last = self.place + 1 if decodes else min(self.place + CHUNK, end)
                start = time.perf_counter()
                following = self.ids[self.place + 1 : last + 1]
                nll += feed(self.model, self.cache, self.ids[self.place : last], following)
                if decodes:
                    decode_ms.append(1e3 * (time.perf_counter() - start))
                self.place = last
        return nll, decode_ms

    def _note(self, tokens: int, chunk_s: float) -> None:
        self.traced = tokens
        row = {"tokens": tokens, "positions": self.cache.manager.num_tokens(self.cache.slots[0])}
        row |= {"kv_bytes": self.cache.stats().kv_bytes, "rss_bytes": psutil.Process().memory_info().rss}
        self.trace.append({**row, "chunk_s": round(chunk_s, 3), "process_cpu_s": round(time.process_time(), 1)})
        print(self.trace[-1], flush=True)

    def counts(self) -> dict[str, Any]:
        places = self.cache.explain(0)
        counts = {"tokens": places.num_tokens, "positions": places.num_positions}
        if self.compactor is not None:
            cut = self.cache.manager.sequences[self.cache.slots[0]].cut
            counts |= {"cuts": self.compactor.num_cuts, "pages_recoded": self.compactor.num_recoded}
            counts["explanation_bytes"] = cut.nbytes if cut else 0
        return counts


def fresh(loaded: Any, ids: Tensor, mark: int, kept: int, scored: int, every: int) -> list[float]:
    """Plain transformers on the `kept` tokens before, for every stretch of `every` scored tokens."""
    nll = []
    for first in range(mark, mark + scored, every):
        cache = DynamicCache(config=loaded.model.config)
        for start in range(first - kept, first, CHUNK):
            feed(loaded.model, cache, ids[start : min(start + CHUNK, first)], None)
        for start in range(first, min(first + every, mark + scored), CHUNK):
            stop = min(start + CHUNK, first + every, mark + scored)
            nll += feed(loaded.model, cache, ids[start:stop], ids[start + 1 : stop + 1])
    return nll


def compare(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Perplexities and their ratio with a bootstrap interval over windows."""
    a, b = (torch.tensor(x).view(-1, WINDOW).mean(-1) for x in (ours, theirs))
    interval = bootstrap_mean_ci((a - b).tolist())
    low, high = (float(torch.tensor(x).exp()) for x in (interval.low, interval.high))
    return {
        "perplexity": float(a.mean().exp()),
        "fresh_perplexity": float(b.mean().exp()),
        "ratio": float((a - b).mean().exp()),
        "ratio_ci95": [low, high],
        "windows": len(a),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=("fp", "int8", "int4"), default="fp", help="how older kept tokens are stored")
    parser.add_argument("--kept", type=int, default=6144, help="tokens kept, and given to the fresh window")
    parser.add_argument("--limit", type=int, help="positions to use instead of the model's trained window")
    parser.add_argument("--positions", choices=("compact", "logical"), default="compact")
    parser.add_argument("--scored", type=int, default=2048, help="tokens scored after every mark")
    parser.add_argument("--fresh-every", type=int, default=2048)
    parser.add_argument("--marks", default="10000,20000,50000")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text; Python's help topics by default")
    parser.add_argument("--fresh-from", metavar="FILE", help="reuse the fresh windows of an earlier result")
    parser.add_argument("--json", required=True, metavar="FILE")
    arguments = parser.parse_args()
    marks = [int(mark) for mark in arguments.marks.split(",")]
    loaded = load_model("demo", threads=arguments.threads)
    environment = collect_environment(model=loaded.name, dtype="float32", threads=arguments.threads)
    thirds = load_thirds(arguments.text)
    ids = encode(loaded.tokenizer, thirds.tuning + thirds.evaluation)  # nothing is tuned here
    if len(ids) <= marks[-1] + arguments.scored:
        raise SystemExit(f"the text has {len(ids)} tokens, {marks[-1] + arguments.scored + 1} are needed")
    config = arm_config(arguments.arm, arguments.kept, arguments.positions)
    earlier = json.loads(Path(arguments.fresh_from).read_text())["fresh_nll"] if arguments.fresh_from else {}
    session = Session(loaded, ids, config, arguments.limit)
    record: dict[str, Any] = {"environment": environment.model_dump(mode="json"), "config": config, "marks": {}}
    record |= {"nll": {}, "fresh_nll": {}, "decode_ms": {}}
    for mark in map(str, marks):
        session.advance(int(mark))
        record["nll"][mark], record["decode_ms"][mark] = session.score(arguments.scored)
        record["fresh_nll"][mark] = earlier.get(mark) or fresh(
            loaded, ids, int(mark), arguments.kept, arguments.scored, arguments.fresh_every
        )
        record["marks"][mark] = compare(record["nll"][mark], record["fresh_nll"][mark])
        record |= {"trace": session.trace, **session.counts()}
        print(mark, json.dumps(record["marks"][mark]), flush=True)
        partial = Path(f"{arguments.json}.tmp")
        partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
        partial.replace(arguments.json)  # an interrupt keeps the marks that are done


if __name__ == "__main__":
    main()
