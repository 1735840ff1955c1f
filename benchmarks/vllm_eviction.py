"""Blocks of running requests given back inside vLLM: who starts when, what is answered, what is left behind.

Per policy, with a pool that holds one of two requests and a bit:

* without dropping the second request waits for the first; with it both run, and each answers as it does alone;
* 200 random requests, some with common prompts, some aborted, leave no block and no fact behind.

    .venv-vllm/bin/python benchmarks/vllm_eviction.py --json benchmarks/results/vllm-eviction.json

About 15 minutes on two cores with the demo model in float32. One engine after the other in processes of their own.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

from vllm_children import child, tell, write

KEPT = {"cold": "drop", "hot_size": 256, "recent_tokens": 128}
ARMS: dict[str, dict[str, Any]] = {
    "nothing dropped": {"cache": {"sparse": {"enabled": True, "budget_fraction": 1.0}}},
    "recent": {"cache": {**KEPT, "policy": "recent"}},
    "budget": {
        "cache": {**KEPT, "policy": "budget", "warm_size": 256, "sparse": {"enabled": True, "budget_tokens": 512}}
    },
}
LENGTHS = (20, 100, 300, 600, 1000)
TOLERANCE = 1e-4  # of log-probabilities
ABORT_SHARE, MOST_ALIVE, REQUESTS = 0.1, 6, 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="of the first request")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--pool-tokens", type=int, default=3072)
    parser.add_argument("--json", dest="json_path")
    parser.add_argument("--child", choices=tuple(ARMS), help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.child:
        tell(run(told))
        return 0
    arms = {name: child(name) for name in ARMS}
    checks = {name: judge(found) for name, found in arms.items()}
    passed = all(all(check.values()) for check in checks.values())
    for name, found in arms.items():
        print(name, {**checks[name], **found})
    print("passed" if passed else "failed")
    if told.json_path:
        from gsm.results import collect_environment

        environment = collect_environment(model=told.model, dtype="float32").model_dump(mode="json")
        result = {
            "kind": "vllm-eviction", "environment": environment, "prompt_tokens": told.prompt_tokens,
            "new_tokens": told.new_tokens, "pool_tokens": told.pool_tokens, "configs": ARMS, "arms": arms,
            "checks": checks, "passed": passed,
        }  # fmt: skip
        write(told.json_path, result)
    return 0 if passed else 1


def judge(found: dict[str, Any]) -> dict[str, bool]:
    dropping = found["dropped_blocks"] > 0
    return {
        "both_run_exactly_where_blocks_are_dropped": (found["most_running"] == 2) == dropping,
        "answers_as_alone": found["equal_tokens"] and found["max_logprob_difference"] <= TOLERANCE,
        "pool_back_to_the_baseline": found["free_blocks_after_two"] == found["free_blocks_before"],
        "nothing_left_of_random_requests": found["free_blocks_after_random"] == found["free_blocks_before"]
        and not found["facts_left"]
        and not found["blocks_held"],
    }


class Engine:
    """vLLM in this process, stepped by hand."""

    def __init__(self, told: argparse.Namespace) -> None:
        from transformers import AutoTokenizer
        from vllm import LLM

        from gsm.config import load_config
        from gsm.integrations.vllm.drive import numba_hidden
        from gsm.integrations.vllm.launch import engine_options
        from gsm.measure.vllm import kv_pool_bytes
        from gsm.models.sources import resolve_source
        from gsm.quality import encode, load_thirds

        source = str(resolve_source(told.model))
        options = engine_options(load_config(ARMS[told.child]))
        with numba_hidden():
            self.llm = LLM(
                model=source, dtype="float32", enforce_eager=True, max_model_len=told.prompt_tokens + told.new_tokens,
                max_num_seqs=8, max_num_batched_tokens=512, enable_prefix_caching=True,
                kv_cache_memory_bytes=kv_pool_bytes(source, told.pool_tokens, "float32"),
                num_gpu_blocks_override=told.pool_tokens // options["block_size"] + 1, **options,
            )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.ids = encode(AutoTokenizer.from_pretrained(source), load_thirds(None).evaluation).tolist()

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, name: str, start: int, num_tokens: int, new_tokens: int) -> None:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens, logprobs=1, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": self.ids[start : start + num_tokens]}, greedy)

    def answers(self, requests: dict[str, tuple[int, int]], new_tokens: int) -> tuple[dict[str, Any], int]:
        """Tokens with their log-probabilities of requests given as (start, length), and how many ran at a time."""
        for name, (start, num_tokens) in requests.items():
            self.add(name, start, num_tokens, new_tokens)
        found, most = {}, 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    answer = output.outputs[0]
                    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
                    found[output.request_id] = [(token, at[token].logprob) for token, at in pairs]
            most = max(most, len(self.scheduler.running))
        return found, most


def run(told: argparse.Namespace) -> dict[str, Any]:
    """Two long requests together and alone, then the random ones."""
    engine = Engine(told)
    before = engine.free_blocks()
    two = {"first": (0, told.prompt_tokens), "second": (len(engine.ids) // 2, told.prompt_tokens * 7 // 8)}
    began = time.perf_counter()
    together, most = engine.answers(two, told.new_tokens)
    seconds = time.perf_counter() - began
    after = engine.free_blocks()
    engine.llm.reset_prefix_cache()
    alone = {name: engine.answers({name: where}, told.new_tokens)[0][name] for name, where in two.items()}
    pairs = [pair for name in two for pair in zip(together[name], alone[name], strict=True)]
    dropped_of_two = engine.manager.num_dropped_blocks
    aborted = random_requests(engine)
    return {
        "most_running": most,
        "seconds_of_both": round(seconds, 1),
        "equal_tokens": all(a[0] == b[0] for a, b in pairs),
        "max_logprob_difference": max(abs(a[1] - b[1]) for a, b in pairs),
        "pool_blocks": before,
        "free_blocks_before": before,
        "free_blocks_after_two": after,
        "free_blocks_after_random": engine.free_blocks(),
        "dropped_blocks": engine.manager.num_dropped_blocks,
        "dropped_blocks_of_random_requests": engine.manager.num_dropped_blocks - dropped_of_two,
        "random_requests": REQUESTS,
        "aborted": aborted,
        "facts_left": len(engine.manager.facts),
        "blocks_held": sum(len(blocks) for blocks in engine.manager.req_to_blocks.values()),
    }


def random_requests(engine: Engine) -> int:
    """Requests of any length that come, go on together and are sometimes aborted; how many were."""
    rng, alive, aborted = random.Random(0), set(), 0
    waiting = [
        (rng.randrange(8) * len(engine.ids) // 10, rng.choice(LENGTHS)) for _ in range(REQUESTS)
    ]  # so that prefixes are shared
    while waiting or engine.engine.has_unfinished_requests():
        while waiting and len(alive) < MOST_ALIVE and rng.random() < 0.7:
            name = f"random-{len(waiting)}"
            engine.add(name, *waiting.pop(), rng.randint(1, 60))
            alive.add(name)
        alive -= {output.request_id for output in engine.engine.step() if output.finished}
        if alive and rng.random() < ABORT_SHARE:
            name = rng.choice(sorted(alive))
            engine.engine.abort_request([name])
            alive.discard(name)
            aborted += 1
    engine.engine.step()
    return aborted


if __name__ == "__main__":
    sys.exit(main())
