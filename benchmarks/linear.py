"""How fast a model's linear layers multiply, by the number of rows: torch's way, oneDNN, and the compiled kernel.

    python benchmarks/linear.py            -> results/linear.json (needs a quiet machine)

Every way multiplies random rows with every weight of the model in turn, so that weights come from memory as in a decode
step; ways take turns, medians of the rounds. The memory's own speed is measured beside: no way can be faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gsm import load_model
from gsm.linear import products
from gsm.measure.bench.timing import memory_bandwidth
from gsm.results import collect_environment, load_average

RESULT = Path(__file__).parent / "results" / "linear.json"
Way = Callable[[Tensor, Tensor, None], Tensor]
ROWS = (1, 2, 4, 8, 16, 64, 1024)
_WARM_UP, _ROUNDS, _ROUNDS_OF_MANY, _MANY = 1, 7, 3, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    environment = collect_environment(model=options.model, device="cpu", threads=options.threads)
    table = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(options.model, threads=options.threads).model.to(dtype)
        weights = [module.weight.detach() for module in model.modules() if type(module) is nn.Linear]
        for rows in ROWS:
            table.append(measure(weights, rows))
            print(table[-1], flush=True)
    content = {
        "command": "python " + " ".join(sys.argv),
        "environment": environment.model_copy(update={"load_average_after": load_average()}).model_dump(mode="json"),
        "memory_bandwidth_gb_per_s": memory_bandwidth(torch.device("cpu")) / 1e9,
        "milliseconds_for_all_weights": table,
    }
    RESULT.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"written: benchmarks/results/{RESULT.name}")


@torch.inference_mode()
def measure(weights: list[Tensor], rows: int) -> dict[str, Any]:
    """Medians in milliseconds of going through all ``weights`` with ``rows`` rows, by way."""
    dtype, inputs = weights[0].dtype, {w.shape[1]: torch.randn(rows, w.shape[1]).to(weights[0].dtype) for w in weights}
    ways: dict[str, Way] = {"torch": functional.linear, "onednn": products.onednn}
    if rows <= 2 * products.FEW_ROWS[dtype]:
        ways["kernel"] = products.few_rows
    rounds = _ROUNDS if rows <= _MANY else _ROUNDS_OF_MANY
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(_WARM_UP + rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            for weight in weights:
                way(inputs[weight.shape[1]], weight, None)
            if turn >= _WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - began))
    found = {name: round(statistics.median(values), 2) for name, values in times.items()}
    return {"dtype": str(dtype).removeprefix("torch."), "rows": rows, **found}


if __name__ == "__main__":
    main()
