"""Tiny random models on vLLM's CPU build, in this process. Skipped where vLLM is not installed (`make test-vllm`)."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}.items():
    os.environ.setdefault(name, value)

Output = tuple[list[int], list[float]]  # tokens and their log-probabilities
BLOCK = 32


@pytest.fixture(scope="session")
def vllm_installed() -> None:
    pytest.importorskip("vllm.version", reason="vLLM is not installed; make test-vllm has an environment of its own")


@pytest.fixture(scope="session")
def tiny_checkpoint(vllm_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with head size 32, the smallest that vLLM's CPU kernel takes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("vllm") / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tiny_checkpoint: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()


SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 64 * 2**20,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "seed": 0,
}


class Engines:
    """The engine at work: vLLM keeps one at a time per process."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._key: Any = None
        self._engine: Any = None

    def __call__(self, config: dict[str, Any] | None, *, forced: bool = False, **options: Any) -> Any:
        """An engine on the tiny model, the one at hand if it was started like this; config None: without GSM.

        `forced`: a `VllmEngine`, whose tokens are chosen from outside.
        """
        key = (config, forced, options)
        if key != self._key:
            self.stop()
            self._engine = self._start(config, forced, options)
            self._key = key
        elif config is not None and not forced:
            reload(self._engine, config)
        return self._engine

    def _start(self, config: dict[str, Any] | None, forced: bool, options: dict[str, Any]) -> Any:
        from vllm import LLM

        from gsm.config import load_config
        from gsm.integrations.vllm.drive import VllmEngine, numba_hidden
        from gsm.integrations.vllm.launch import engine_options

        if forced:
            return VllmEngine(str(self.checkpoint), load_config(config), **{**SMALL, **options})
        own = {} if config is None else engine_options(load_config(config))
        with numba_hidden():
            return LLM(model=str(self.checkpoint), **{**SMALL, **own, **options})

    def stop(self) -> None:
        if self._engine is None:
            return
        close = getattr(self._engine, "close", None) or self._engine.llm_engine.engine_core.shutdown
        close()
        self._engine = self._key = None
        gc.collect()


@pytest.fixture(scope="session")
def start(tiny_checkpoint: Path) -> Iterator[Engines]:
    engines = Engines(tiny_checkpoint)
    yield engines
    engines.stop()


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 512, (n,), generator=generator).tolist() for n in lengths]


def generate(llm: Any, ids: list[list[int]], new_tokens: int = 24, **parameters: Any) -> list[Output]:
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, logprobs=1, ignore_eos=True, detokenize=False, **parameters
    )
    answers = llm.generate([{"prompt_token_ids": one} for one in ids], greedy, use_tqdm=False)
    return [output_of(answer) for answer in answers]


def output_of(answer: Any) -> Output:
    tokens = list(answer.outputs[0].token_ids)
    return tokens, [at[token].logprob for token, at in zip(tokens, answer.outputs[0].logprobs, strict=True)]


def same(one: list[Output], other: list[Output], within: float = 1e-4) -> bool:
    """Equal tokens and log-probabilities."""
    return all(
        a[0] == b[0] and max(abs(x - y) for x, y in zip(a[1], b[1], strict=True)) <= within
        for a, b in zip(one, other, strict=True)
    )


def reload(llm: Any, config: dict[str, Any]) -> dict[str, Any]:
    (answer,) = llm.collective_rpc("gsm_reload", args=(config,))
    return dict(answer)


def greedy_reference(
    model: Any, prompt: list[int], new_tokens: int, mask: Callable[[int], torch.Tensor] | None = None
) -> Output:
    """Greedy tokens of a transformers model; `mask(n)` is an additive mask `[n, n]`."""
    tokens, scores = list(prompt), []
    for _ in range(new_tokens):
        more = {} if mask is None else {"attention_mask": mask(len(tokens))[None, None]}
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), **more).logits[0, -1].log_softmax(-1)
        tokens.append(int(logits.argmax()))
        scores.append(float(logits.max()))
    return tokens[len(prompt) :], scores


@pytest.fixture(scope="session")
def tools() -> Any:
    """The helpers of this file, for tests that cannot import it."""
    from types import SimpleNamespace

    return SimpleNamespace(
        prompts=prompts, generate=generate, same=same, reload=reload, reference=greedy_reference, output_of=output_of,
        small=SMALL,
    )  # fmt: skip
