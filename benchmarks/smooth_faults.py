"""Does the guard find exactly the modules that do damage? Three of them are sabotaged, 20 times over.

    python benchmarks/smooth_faults.py            -> results/smooth_faults.json

On the demo model in int8: the weights of three modules, drawn by the seed, lie upside down whenever they are not rolled
back. The guard knows nothing of it; it must roll back these three and no other, and leave the model as it was.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gsm import load_model, smoothing
from gsm.config.smoothing import GuardConfig, SmoothingConfig
from gsm.guard import search
from gsm.quality.texts import encode, load_thirds
from gsm.results import collect_environment, load_average
from gsm.smoothing.edits import Edits

RESULT = Path(__file__).parent / "results" / "smooth_faults.json"
CULPRITS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1024, help="of each evaluation during a search")
    parser.add_argument("--max-kl", type=float, default=0.1, help="plain int8 passes with room to spare")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    loaded = load_model("demo", threads=options.threads)
    thirds = load_thirds()
    limits = GuardConfig(
        tolerance=0.2,
        short_tolerance=0.2,
        max_kl=options.max_kl,
        search_tokens=options.tokens,
        final_tokens=options.tokens,
    )
    config = SmoothingConfig(int8="dynamic", guard=limits)
    environment = collect_environment(model=loaded.name, dtype="float32", device="cpu", threads=torch.get_num_threads())
    text = encode(loaded.tokenizer, thirds.evaluation)
    with smoothing.apply(loaded.model, config) as applied:
        units = list(applied.units)
    rows = [try_seed(loaded.model, config, text, units, seed) for seed in range(options.seeds)]
    content = {
        "command": "python " + " ".join(sys.argv),
        "environment": environment.model_copy(update={"load_average_after": load_average()}).model_dump(mode="json"),
        "text_sha256": thirds.sha256("evaluation"),
        "config": config.model_dump(mode="json"),
        "num_modules": len(units),
        "num_exact": sum(row["is_exact"] for row in rows),
        "num_restored": sum(row["is_restored"] for row in rows),
        "num_seeds": len(rows),
        "seeds": rows,
    }
    RESULT.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"{content['num_exact']} of {len(rows)} exact; written: benchmarks/results/{RESULT.name}")


def try_seed(
    model: nn.Module, config: SmoothingConfig, text: torch.Tensor, units: list[str], seed: int
) -> dict[str, Any]:
    """One search with three saboteurs among ``units``."""
    guilty, began = sorted(random.Random(seed).sample(units, CULPRITS)), time.perf_counter()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome = search(model, config, text, apply=sabotaging(guilty))
    after = model.state_dict()
    row = {
        "seed": seed,
        "sabotaged": guilty,
        "rolled_back": sorted(outcome.rolled_back),
        "is_exact": outcome.accepted and sorted(outcome.rolled_back) == guilty,
        "is_restored": list(after) == list(before) and all(torch.equal(after[n], t) for n, t in before.items()),
        "num_evaluations": len(outcome.steps),
        "seconds": time.perf_counter() - began,
    }
    print(seed, row["is_exact"], f"{row['seconds']:.0f} s", flush=True)
    return row


def sabotaging(names: list[str]) -> Callable[..., Any]:
    """`smoothing.apply`, with the weights of ``names`` upside down first unless they are excluded."""

    @contextmanager
    def apply(model: Any, config: Any, *, exclude: Any = (), **rest: Any) -> Iterator[smoothing.Applied]:
        edits = Edits(model)
        try:
            for name in set(names) - set(exclude):
                edits.set_parameter(f"{name}.weight", model.get_submodule(name).weight.flip(0))
            with smoothing.apply(model, config, exclude=exclude, **rest) as applied:
                yield applied
        finally:
            edits.undo()

    return apply


if __name__ == "__main__":
    main()
