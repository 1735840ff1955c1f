"""`gsm generate FILE.gguf --backend llamacpp`."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gsm.errors import InputError
from gsm.integrations.llamacpp.endless import Endless, EndlessOptions
from gsm.results import GenerateResult, collect_environment


def generate_gguf(
    llm: Any,
    prompt: str,
    *,
    options: EndlessOptions,
    on_text: Callable[[str], None],
    max_new_tokens: int,
    system: str | None = None,
    chat: bool | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> GenerateResult:
    """Generate after a prompt in a window that never ends; a temperature of 0 is greedy.

    The system prompt and the user's message are never forgotten. Raises InputError where they fill the window.
    """
    first, last = _encode(llm, prompt, system, chat)
    if len(first) + len(last) > options.window_tokens // 2:
        raise InputError(
            f"system prompt and message are {len(first) + len(last)} tokens, more than half of the window of "
            f"{options.window_tokens}; they are never forgotten, so use a larger --window"
        )
    endless = Endless(llm, options, num_first=len(first))
    rng, decoder = np.random.default_rng(seed), codecs.getincrementaldecoder("utf-8")(errors="ignore")
    text, times = "", []
    start_s = time.perf_counter()
    logits = endless.feed([*first, *last])
    endless.protect(len(last))
    for _ in range(max_new_tokens):
        token = sample(logits, temperature, top_p, rng)
        if token == llm.token_eos():
            break
        times.append(time.perf_counter())
        piece = decoder.decode(llm.detokenize([token], special=False))
        text += piece
        on_text(piece)
        if len(times) < max_new_tokens:
            logits = endless.feed([token])
    return GenerateResult(
        environment=collect_environment(model=llm.model_path.rsplit("/", 1)[-1], dtype="gguf"),
        config={"backend": "llamacpp", **vars(options)},
        text=text,
        prompt_tokens=len(first) + len(last),
        new_tokens=len(times),
        ttft_ms=1e3 * (times[0] - start_s) if times else None,
        tpot_ms=1e3 * (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        kv_bytes=endless.kv_bytes(),
        kv_pool_bytes=None,
        attended_tokens_mean=None,
    )


def sample(logits: NDArray[np.float32], temperature: float, top_p: float, rng: np.random.Generator) -> int:
    """Greedy at temperature 0; otherwise from the smallest set of tokens with a probability of at least `top_p`."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / temperature
    weights = np.exp(scaled.astype(np.float64))
    weights /= weights.sum()
    order = np.argsort(-weights)
    kept = order[: int(np.searchsorted(np.cumsum(weights[order]), top_p)) + 1]
    return int(rng.choice(kept, p=weights[kept] / weights[kept].sum()))


def _encode(llm: Any, prompt: str, system: str | None, chat: bool | None) -> tuple[list[int], list[int]]:
    """Token ids of what comes first (system prompt) and of the user's message."""
    template = llm.metadata.get("tokenizer.chat_template")
    if chat and not template:
        raise InputError("this file has no chat template; use --no-chat")
    if chat is False or not template:
        return llm.tokenize((system or "").encode(), add_bos=True) if system else [], llm.tokenize(
            prompt.encode(), add_bos=not system
        )
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    special = {"bos_token": "", "eos_token": ""}
    messages = [{"role": "system", "content": system}] if system else []
    whole = environment.from_string(template).render(
        messages=[*messages, {"role": "user", "content": prompt}], add_generation_prompt=True, **special
    )
    head, found, tail = whole.partition(prompt)
    if not found:
        head, tail = "", whole
    ids = [llm.tokenize(part.encode(), add_bos=False, special=True) for part in (head, found + tail)]
    return ids[0], ids[1]
