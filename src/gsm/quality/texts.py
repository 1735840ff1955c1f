"""Text for measurements: one source cut into disjoint thirds, so that nothing is evaluated on what it was tuned on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gsm.errors import InputError
from gsm.results import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THIRDS = ("calibration", "tuning", "evaluation")
_MIN_CHARACTERS = 3_000


@dataclass(frozen=True)
class TextThirds:
    """Three consecutive, disjoint parts of one text, and its name."""

    name: str
    calibration: str
    tuning: str
    evaluation: str

    def sha256(self, third: str) -> str:
        """The first 16 hex digits of the part's SHA-256: two results are comparable when these agree."""
        return hashlib.sha256(self.part(third).encode()).hexdigest()[:16]

    def hashes(self) -> dict[str, str]:
        return {third: self.sha256(third) for third in THIRDS}

    def part(self, third: str) -> str:
        if third not in THIRDS:
            raise InputError(f"text third {third!r} is unknown; use one of {', '.join(THIRDS)}")
        text: str = getattr(self, third)
        return text


def load_thirds(path: str | Path | None = None) -> TextThirds:
    """The thirds of a UTF-8 text file, or of the standard library's help topics (about 700 kB of English).

    Cuts fall on the paragraph border nearest to each third. Raises InputError for a file that cannot be read or is too
    short.
    """
    name, text = _topics() if path is None else (Path(path).name, read_text(path, "text file"))
    if len(text) < _MIN_CHARACTERS:
        raise InputError(
            f"{name} holds {len(text)} characters; measuring needs at least {_MIN_CHARACTERS}, give a longer text"
        )
    first, second = _paragraph_near(text, len(text) // 3), _paragraph_near(text, 2 * len(text) // 3)
    return TextThirds(name, text[:first], text[first:second], text[second:])


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Token ids of ``text`` without special tokens, int64, shape [num_tokens]."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def _topics() -> tuple[str, str]:
    from pydoc_data.topics import topics

    return "pydoc_data.topics", "\n\n".join(topics[name] for name in sorted(topics))


def _paragraph_near(text: str, position: int) -> int:
    """The end of the last paragraph before ``position``, or ``position`` itself in a text without any."""
    border = text.rfind("\n\n", position - position // 3, position)
    return border + 2 if border >= 0 else position
