"""What to measure: the whole benchmark, and one arm's share of it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from gsm.errors import InputError
from gsm.measure.bench.arms import DEFAULT_ARMS
from gsm.quality import MIN_WINDOWS


@dataclass(frozen=True)
class Job:
    """What one arm's process has to do; everything in it survives JSON."""

    model: str
    arm: str
    prompt_tokens: int
    new_tokens: int
    batch_size: int
    chunk_tokens: int
    dtype: str = "float32"
    threads: int | None = None
    device: str = "cpu"
    text: str | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class BenchSpec:
    """A benchmark: the same prompt for every arm. Sizes are in tokens, times in seconds.

    ``chunk_tokens`` is the prefill chunk of every arm, ``num_windows`` and ``needles_per_depth`` the amount of quality
    measured (0: none); ``profile`` splits a decode step of every arm into its parts. Raises InputError for a size that
    makes no sense.
    """

    model: str
    prompt_tokens: int
    new_tokens: int = 64
    runs: int = 3
    batch_size: int = 1
    arms: tuple[str, ...] = DEFAULT_ARMS
    dtype: str = "float32"
    threads: int | None = None
    device: str = "cpu"
    text: str | None = None
    chunk_tokens: int = 1024
    warmup: bool = True
    unchunked: bool = True
    profile: bool = False
    num_windows: int = MIN_WINDOWS
    window_tokens: int = 128
    windows_per_prefill: int = 2
    needles_per_depth: int = 10
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        for name in (
            "prompt_tokens",
            "new_tokens",
            "runs",
            "batch_size",
            "chunk_tokens",
            "window_tokens",
            "windows_per_prefill",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("num_windows", "needles_per_depth", "wait_s"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; it must not be negative")

    @property
    def measures_quality(self) -> bool:
        return self.num_windows > 0 or self.needles_per_depth > 0

    def job(self, arm: str) -> Job:
        return Job(
            model=self.model,
            arm=arm,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            batch_size=self.batch_size,
            chunk_tokens=self.chunk_tokens,
            dtype=self.dtype,
            threads=self.threads,
            device=self.device,
            text=self.text,
        )
