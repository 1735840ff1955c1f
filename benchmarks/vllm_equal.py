"""Everything selected equals vLLM without GSM: tokens, and log-probabilities within 1e-4.

Prompts of 4096 and 7680 tokens, batches of 1 and 4, with prefix caching and chunked prefill on; every batch runs twice,
so that the second one is made of prefix hits. One engine after the other in processes of their own.

    .venv-vllm/bin/python benchmarks/vllm_equal.py --json benchmarks/results/vllm-equal.json

About 12 minutes on two cores with the demo model in float32.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vllm_children import child, tell, write

ALL = {"cache": {"sparse": {"enabled": True, "budget_fraction": 1.0}}, "vllm": {"always_select": True}}
TOLERANCE = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lengths", default="4096,7680")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", help="vLLM back end, on CUDA: FLASH_ATTN or TRITON_ATTN")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--json", dest="json_path")
    parser.add_argument("--child", choices=("stock", "all"), help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.child:
        tell(run(told))
        return 0
    arms = {name: child(name) for name in ("stock", "all")}
    cases = [compare(a, b) for a, b in zip(arms["stock"]["cases"], arms["all"]["cases"], strict=True)]
    passed = all(case["equal_tokens"] and case["max_logprob_difference"] <= told.tolerance for case in cases)
    for case in cases:
        print({name: value for name, value in case.items()})
    print("passed" if passed else "failed", arms["all"]["counters"])
    if told.json_path:
        from gsm.results import collect_environment

        environment = collect_environment(model=told.model, dtype=told.dtype).model_dump(mode="json")
        result = {
            "kind": "vllm-equal", "environment": environment, "config": ALL, "tolerance": told.tolerance,
            "cases": cases, "counters": arms["all"]["counters"], "passed": passed,
        }  # fmt: skip
        write(told.json_path, result)
    return 0 if passed else 1


def run(told: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    from transformers import AutoTokenizer
    from vllm import LLM

    from gsm.config import load_config
    from gsm.integrations.vllm.drive import numba_hidden
    from gsm.integrations.vllm.launch import block_tokens, engine_options
    from gsm.integrations.vllm.live import live_of
    from gsm.measure.vllm import kv_pool_bytes
    from gsm.models.sources import resolve_source
    from gsm.quality import encode, load_thirds

    lengths, batches = ([int(x) for x in text.split(",")] for text in (told.lengths, told.batches))
    source = str(resolve_source(told.model))
    options: dict[str, Any] = {"block_size": block_tokens(None, told.device)}
    if told.child == "all":
        options = engine_options(load_config(ALL), told.device)
    if told.attention:
        options["attention_backend"] = told.attention
    longest = max(lengths) + told.new_tokens
    with numba_hidden():
        llm = LLM(
            model=source, dtype=told.dtype, enforce_eager=True, max_model_len=longest, max_num_seqs=max(batches),
            max_num_batched_tokens=told.chunk_tokens, enable_prefix_caching=True,
            kv_cache_memory_bytes=kv_pool_bytes(source, (max(batches) + 1) * longest, told.dtype), **options,
        )  # fmt: skip
    ids = encode(AutoTokenizer.from_pretrained(source), load_thirds(None).evaluation).tolist()
    cases = []
    for length in lengths:
        for batch in batches:
            prompts = [ids[i * 977 : i * 977 + length] for i in range(batch)]
            for attempt in ("computed", "reused"):
                answers = generate(llm, prompts, told.new_tokens)
                cases.append({"prompt_tokens": length, "batch": batch, "prefix": attempt, "answers": answers})
                print(told.child, length, batch, attempt, file=sys.stderr, flush=True)
    live = live_of(llm.llm_engine.vllm_config)
    return {"cases": cases, "counters": asdict(live.counters) if live else None}


def generate(llm: Any, prompts: list[list[int]], new_tokens: int) -> list[Any]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens, logprobs=1, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": one} for one in prompts], greedy, use_tqdm=False)
    return [
        [(token, at[token].logprob) for token, at in zip(a.outputs[0].token_ids, a.outputs[0].logprobs, strict=True)]
        for a in answers
    ]


def compare(stock: dict[str, Any], everything: dict[str, Any]) -> dict[str, Any]:
    """One case without its answers."""
    pairs = [
        p for a, b in zip(stock.pop("answers"), everything.pop("answers"), strict=True) for p in zip(a, b, strict=True)
    ]
    return {
        **stock,
        "equal_tokens": all(a[0] == b[0] for a, b in pairs),
        "max_logprob_difference": max(abs(a[1] - b[1]) for a, b in pairs),
    }


if __name__ == "__main__":
    sys.exit(main())
