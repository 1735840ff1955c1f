"""A tiny random model with a real tokenizer in a directory, and arms made of plain Python, for tests of measuring."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gsm.models import resolve_source
from gsm.quality import SessionStats, score_by_steps
from support_models import build_tiny_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def save_tiny_model(directory: Path) -> Path:
    """A random two-layer Llama with the demo model's tokenizer; its window is 1024 tokens."""
    model = build_tiny_model(
        "llama", vocab_size=49152, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        max_position_embeddings=1024,
    )  # fmt: skip
    model.save_pretrained(directory)
    source = Path(resolve_source("demo"))
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, directory / name)
    return directory


class RuleArm:
    """An arm whose logits follow from the ids it has seen and how they came: ``rule(calls) -> logits [vocab]``.

    ``calls`` lists ("prefill" | "step", [ids]) in order.
    """

    def __init__(self, name: str, rule: Callable[[list[tuple[str, list[int]]]], torch.Tensor]):
        self.name, self.rule = name, rule
        self.log: list[list[tuple[str, list[int]]]] = []

    @contextmanager
    def open(self) -> Iterator[RuleSession]:
        yield RuleSession(self, [])


class RuleSession:
    def __init__(self, arm: RuleArm, calls: list[tuple[str, list[int]]]):
        self.arm, self.calls = arm, calls
        arm.log.append(calls)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for _, ids in self.calls)

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls.append(("prefill", ids[0].tolist()))
        return self.arm.rule(self.calls)[None]

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        return score_by_steps(self, ids)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls.append(("step", ids[0].tolist()))
        return self.arm.rule(self.calls)[None]

    def fork(self) -> RuleSession:
        return RuleSession(self.arm, list(self.calls))

    def close(self) -> None:
        pass

    def stats(self) -> SessionStats:
        return SessionStats(0, 0, None)
