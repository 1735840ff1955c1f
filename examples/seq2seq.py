"""Train a small encoder-decoder on copying and reversing long inputs, then decode it with a cache and a sparse index.

    python examples/seq2seq.py

The model is built from `gsm.nn.DecoderAttention` alone: bidirectional self attention in the encoder, causal self
attention and cross attention in the decoder. Decoding keeps the decoder's own past in a `gsm.nn.KVCache`, projects the
encoder's output once, and lets every step of cross attention read the pages of it that look best to its query.
Everything is trained and tested on the CPU in less than two minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gsm.nn

NUM_SYMBOLS, COPY, REVERSE, START = 26, 26, 27, 28
LONGEST = 192  # input symbols
CACHE = {"cache": {"page_size": 8, "hot_size": 32, "recent_tokens": 16, "sink_tokens": 1}}


class Block(nn.Module):
    """Pre-norm: self attention, cross attention where there is a memory, feed-forward."""

    def __init__(self, dim: int, layer: int, decoder: bool) -> None:
        super().__init__()
        self.own = gsm.nn.DecoderAttention(dim, 4, 2, rope_theta=1e3, causal=decoder, layer_idx=layer)
        self.cross = gsm.nn.DecoderAttention(dim, 4, 2, memory_dim=dim) if decoder else None
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))

    def forward(self, x: Tensor, memory: object = None, *, padding=None, cache=None, index=None) -> Tensor:
        own_padding = padding if self.cross is None else None
        x = x + self.own(self.norms[0](x), key_padding_mask=own_padding, cache=cache)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory, key_padding_mask=padding, index=index)
        return x + self.mlp(x)


class Places(nn.Module):
    """A learned linear map of sines and cosines: what is learned at short lengths holds at long ones."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("rates", torch.pi / 2 ** torch.linspace(0.5, 8, dim // 2))
        self.map = nn.Linear(dim, dim, bias=False)

    def forward(self, places: Tensor) -> Tensor:
        angles = places.unsqueeze(-1) * self.rates
        return self.map(torch.cat((angles.sin(), angles.cos()), dim=-1))


class Seq2Seq(nn.Module):
    """Positions are counted from both ends, so that "the mirrored place" is easy to say."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_SYMBOLS + 3, dim)
        self.from_start, self.from_end = Places(dim), Places(dim)
        self.encoder = nn.ModuleList(Block(dim, layer, decoder=False) for layer in range(1))
        self.decoder = nn.ModuleList(Block(dim, layer, decoder=True) for layer in range(2))
        self.head = nn.Linear(dim, NUM_SYMBOLS)

    def encode(self, source: Tensor, padding: Tensor) -> Tensor:
        """`source [B, 1 + N]`, the task first; it is added to every symbol. Memory `[B, N, dim]`."""
        task, symbols = source[:, :1], source[:, 1:]
        place = torch.arange(symbols.shape[1])
        length = (~padding).sum(-1, keepdim=True)
        x = self.embed(symbols) + self.embed(task) + self.from_start(place)
        x = x + self.from_end((length - 1 - place).clamp_min(0))
        for block in self.encoder:
            x = block(x, padding=padding)
        return x

    def decode(self, target: Tensor, task: Tensor, first: int, memory: list, **options) -> Tensor:
        """Logits `[B, T, symbols]` after the tokens `target [B, T]`, which stand at places first, first + 1, ..."""
        x = self.embed(target) + self.embed(task) + self.from_start(torch.arange(first, first + target.shape[1]))
        for block, part in zip(self.decoder, memory, strict=True):
            x = block(x, part, **options)
        return self.head(x)

    def memories(self, encoded: Tensor) -> list[gsm.nn.Memory]:
        return [block.cross.project(encoded) for block in self.decoder]


def make_batch(size: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """`source [B, 1 + N]` (task first), `padding [B, N]` (true = no symbol), `answer [B, N]` (-100 where padded)."""
    lengths = torch.randint(longest // 2, longest + 1, (size, 1), generator=generator)
    symbols = torch.randint(0, NUM_SYMBOLS, (size, longest), generator=generator)
    task = torch.randint(COPY, REVERSE + 1, (size, 1), generator=generator)
    place = torch.arange(longest)
    padding = place >= lengths
    mirrored = symbols.gather(1, (lengths - 1 - place).clamp_min(0))
    answer = torch.where(task == COPY, symbols, mirrored).masked_fill(padding, -100)
    return torch.cat((task, symbols.masked_fill(padding, 0)), dim=1), padding, answer


def train(model: Seq2Seq, max_steps: int, generator: torch.Generator) -> int:
    """Short inputs first, twice as long whenever the loss is small; returns the number of steps."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    start, step, smooth, longest = time.process_time(), 0, 3.3, LONGEST // 8
    while step < max_steps and (smooth > 0.01 or longest < LONGEST):
        if smooth < 0.1 and longest < LONGEST:
            longest, smooth = min(LONGEST, 2 * longest), 0.5
        source, padding, answer = make_batch(32, longest, generator)
        shifted = F.pad(answer.clamp_min(0)[:, :-1], (1, 0), value=START)
        encoded = model.encode(source, padding)
        logits = model.decode(shifted, source[:, :1], 0, [encoded] * len(model.decoder), padding=padding)
        loss = F.cross_entropy(logits.flatten(0, 1), answer.flatten(), ignore_index=-100)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        smooth = 0.9 * smooth + 0.1 * loss.item()
        step += 1
        if step % 50 == 0:
            print(f"  step {step}, {time.process_time() - start:.0f} s: up to {longest}, loss {smooth:.4f}", flush=True)
    return step


@torch.inference_mode()
def answer_with(model: Seq2Seq, source: Tensor, padding: Tensor, mode: str) -> tuple[Tensor, int]:
    """Greedy answers `[B, N]` and the largest number of memory keys a step read. mode: plain, cache, sparse."""
    encoded = model.encode(source, padding)
    task = source[:, :1]
    token = torch.full((len(source), 1), START)
    given, num_read = token, encoded.shape[1]
    options: dict = {"padding": padding}
    if mode == "sparse":
        # a key that is padding can be chosen, and is masked all the same
        options["index"] = partial(gsm.nn.best_tokens, num_tokens=LONGEST // 4, page_size=8)
        num_read = LONGEST // 4
    memory = model.memories(encoded)
    cache = gsm.nn.KVCache(len(model.decoder), CACHE)
    for place in range(encoded.shape[1]):
        if mode == "plain":  # everything anew at every step
            logits = model.decode(given, task, 0, memory, **options)
        else:
            with cache.step(token) as step:
                logits = model.decode(token, task, place, memory, cache=step, **options)
        token = logits[:, -1:].argmax(-1)
        given = torch.cat((given, token), dim=1)
    return given[:, 1:], num_read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500, help="training steps at most")
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Seq2Seq()
    print(f"training {sum(p.numel() for p in model.parameters())} weights on inputs of up to {LONGEST} symbols")
    start = time.process_time()
    num_steps = train(model, arguments.steps, generator)
    result: dict = {"steps": num_steps, "training_cpu_s": round(time.process_time() - start, 1), "decoding": {}}
    model.eval()
    source, padding, answer = make_batch(16, LONGEST, torch.Generator().manual_seed(2))
    plain = None
    for mode in ("plain", "cache", "sparse"):
        begun = time.process_time()
        got, num_read = answer_with(model, source, padding, mode)
        plain = got if plain is None else plain
        asked = ~padding
        accuracy = float((got == answer)[asked].float().mean())
        equal = float((got == plain)[asked].float().mean())
        whole = float(((got == answer) | padding).all(-1).float().mean())
        figures = {"symbols_right": accuracy, "answers_right": whole, "same_as_plain": equal, "keys_read": num_read}
        result["decoding"][mode] = {**figures, "decode_cpu_s": round(time.process_time() - begun, 2)}
        print(f"{mode:>7}: {accuracy:7.2%} of symbols and {whole:7.2%} of answers right, {num_read} memory keys read")
    if arguments.json:
        from pathlib import Path

        result = {"command": "python examples/seq2seq.py --json FILE", "threads": torch.get_num_threads(), **result}
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
