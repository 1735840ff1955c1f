"""Speed and bytes of quantised weights with and without GSM at 4k tokens of context, each on the same loaded model.

    python benchmarks/quantised.py none torchao-int8 bnb-8bit bnb-4bit gptq --json benchmarks/results/quantised.json

`none` is the model as it is in the file (the demo GGUF, unpacked to float32). Greedy tokens of the full cache are
compared with plain transformers on the same quantised weights; speed is the median of the runs, arms in turn; KL is
that of sparse against the full cache, same weights again. `gptq` is quantised here first, by gptqmodel (4 bits).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from gsm.config import load_config
from gsm.measure.bench.timing import timed_run
from gsm.models import LoadedModel, load_model
from gsm.models.weights import weight_bytes
from gsm.quality import Assessment, GsmArm, PlainArm, QualityPlan, encode, load_thirds
from gsm.results import collect_environment, load_average


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="+")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    environment = collect_environment(model=options.model, threads=torch.get_num_threads())
    rows = []
    for name in options.formats:
        rows.append(measure(name, options))
        print(rows[-1], flush=True)
        if options.json:  # after every format, so that an interrupt keeps what is complete
            environment = environment.model_copy(update={"load_average_after": load_average()})
            result = {"environment": environment.model_dump(mode="json"), "formats": rows}
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One format: tokens with the full cache, then TTFT, TPOT and bytes of plain transformers and sparse."""
    loaded = load(name, options.model)
    text_ids = encode(loaded.tokenizer, load_thirds().evaluation)
    prompt = text_ids[None, : options.prompt_tokens]
    configs = {arm: load_config({"cache": {"preset": arm}}) for arm in ("full", "sparse")}
    plain = PlainArm(loaded.model)
    full, sparse = (GsmArm(loaded.model, configs[arm], name=arm) for arm in ("full", "sparse"))
    short = prompt[:, :256]
    row: dict[str, Any] = {
        "format": name,
        "weight_bytes": weight_bytes(loaded.model),
        "full_equals_plain": greedy(full, short) == greedy(plain, short),
    }
    samples: dict[str, list[tuple[float, float | None]]] = {"transformers": [], "sparse": []}
    for _ in range(options.runs):
        for arm in (plain, sparse):
            ttft_ms, tpot_ms, stats = timed_run(arm, prompt, options.new_tokens)
            samples[arm.name].append((ttft_ms, tpot_ms))
            row[f"{arm.name}_kv_bytes"] = stats.kv_bytes
    for arm_name, pairs in samples.items():
        row[f"{arm_name}_ttft_ms"] = statistics.median(pair[0] for pair in pairs)
        row[f"{arm_name}_tpot_ms"] = statistics.median(pair[1] for pair in pairs if pair[1] is not None)
    plan = QualityPlan.make(
        options.prompt_tokens,
        num_windows=options.windows,
        windows_per_prefill=2,
        needles_per_depth=0,
        max_positions=loaded.arch.max_position_embeddings or 0,
    )
    assessment = Assessment(plain, [sparse], loaded.tokenizer, text_ids, plan)
    assessment.run()
    row["sparse_quality"] = assessment.results()["sparse"].model_dump(mode="json", exclude_none=True)
    return row


def load(name: str, source: str) -> LoadedModel:
    """The model in a format: as it is, quantised by transformers while loading, or by gptqmodel before."""
    if name != "gptq":
        return load_model(source, quantization=None if name == "none" else name)
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its own default on two cores is too few for it to start
    from gptqmodel import GPTQModel, QuantizeConfig

    plain = load_model(source)
    with tempfile.TemporaryDirectory() as directory:
        unpacked, quantised = f"{directory}/plain", f"{directory}/gptq"
        plain.model.save_pretrained(unpacked)
        plain.tokenizer.save_pretrained(unpacked)
        text = encode(plain.tokenizer, load_thirds().calibration)[: 16 * 256].view(16, 256).tolist()
        rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in text]
        quantiser = GPTQModel.load(unpacked, QuantizeConfig(bits=4, group_size=32), device="cpu")
        quantiser.quantize(rows, batch_size=1)
        quantiser.save(quantised)
        return load_model(quantised)


def greedy(arm: Any, prompt: torch.Tensor, new_tokens: int = 24) -> list[int]:
    with arm.open() as session:
        tokens = [int(session.prefill(prompt).argmax())]
        while len(tokens) < new_tokens:
            tokens.append(int(session.step(torch.tensor([[tokens[-1]]])).argmax()))
    return tokens


if __name__ == "__main__":
    main()
