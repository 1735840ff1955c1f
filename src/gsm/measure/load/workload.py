"""Prompts: synthetic ones with a set share of common prefix, or those of a file. Deterministic in the seed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from gsm.errors import ConfigError, InputError

# Common English words: with a space before them each is one token in the usual byte-pair vocabularies, so words count
# as tokens within a few per cent (the server's own count is reported beside).
_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part over new "
    "sound take only little work know place year live me back give most very after thing our just name good sentence "
    "man think say great where help through much before line right too mean old any same tell boy follow came want "
    "show also around form three small set put end does another well large must big even such because turn here why "
    "ask went men read need land "
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Prompt:
    """One request's input: text (or chat messages as given) and the most tokens it may generate."""

    content: str | list[Mapping[str, Any]]
    max_tokens: int

    def messages(self) -> list[Mapping[str, Any]]:
        return [{"role": "user", "content": self.content}] if isinstance(self.content, str) else self.content


class Workload(Protocol):
    """A source of prompts. The same `(stream, index)` always gives the same prompt; streams never share one."""

    def prompt(self, stream: str, index: int) -> Prompt: ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class SyntheticWorkload:
    """Random words: `prefix_share` of every prompt is the same text, the rest is different in each."""

    num_prompt_tokens: int = 512
    num_output_tokens: int = 128
    prefix_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 1:
            raise ConfigError(
                f"prompts and outputs need at least 1 token, got {self.num_prompt_tokens} and {self.num_output_tokens}"
            )
        if not 0 <= self.prefix_share <= 1:
            raise ConfigError(f"the share of common prefix lies between 0 and 1, got {self.prefix_share}")

    def prompt(self, stream: str, index: int) -> Prompt:
        num_shared = round(self.num_prompt_tokens * self.prefix_share)
        words = self._words("prefix", num_shared)
        words += self._words(f"{stream}/{index}", self.num_prompt_tokens - num_shared)
        return Prompt(" ".join(words), self.num_output_tokens)

    def describe(self) -> dict[str, Any]:
        return {
            "prompts": "synthetic",
            "num_prompt_words": self.num_prompt_tokens,
            "max_output_tokens": self.num_output_tokens,
            "prefix_share": self.prefix_share,
            "seed": self.seed,
        }

    def _words(self, name: str, count: int) -> list[str]:
        return random.Random(f"{self.seed}/{name}").choices(_WORDS, k=count)


@dataclass(frozen=True)
class FileWorkload:
    """Prompts from a file, in order and from the start again when they run out (which a prefix cache will notice)."""

    prompts: tuple[Prompt, ...]
    source: str

    def prompt(self, stream: str, index: int) -> Prompt:
        """Measured requests read forwards, the warm-up backwards, so that they meet as late as possible."""
        position = -1 - index if stream == "warmup" else index
        return self.prompts[position % len(self.prompts)]

    def describe(self) -> dict[str, Any]:
        return {"prompts": self.source, "num_distinct_prompts": len(self.prompts)}


def read_prompts(path: Path, num_output_tokens: int) -> FileWorkload:
    """Reads `.jsonl` lines with `prompt` or `messages` (and, if present, `max_tokens`), or one prompt per text line.

    Raises InputError naming the line that cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts cannot be read from {path}: {error}") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix in (".jsonl", ".ndjson"):
        prompts = tuple(_json_prompt(line, num_output_tokens, f"{path} line {number}") for number, line in numbered)
    else:
        prompts = tuple(Prompt(line, num_output_tokens) for _, line in numbered)
    if not prompts:
        raise InputError(f"{path} holds no prompt; write one per line, or JSON lines with a prompt or messages field")
    return FileWorkload(prompts, path.name)


def _json_prompt(line: str, num_output_tokens: int, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is no JSON: {error}") from error
    content = entry.get("messages", entry.get("prompt")) if isinstance(entry, dict) else None
    is_chat = isinstance(content, list) and bool(content) and all(isinstance(m, dict) and "role" in m for m in content)
    if not (is_chat or (isinstance(content, str) and content)):
        raise InputError(f"{where} has neither a prompt (text) nor messages (a list of objects with a role)")
    max_tokens = entry.get("max_tokens", num_output_tokens)
    if type(max_tokens) is not int or max_tokens < 1:
        raise InputError(f"{where} has max_tokens {max_tokens!r}; write a whole number above 0")
    return Prompt(cast("str | list[Mapping[str, Any]]", content), max_tokens)
