"""What to probe."""

from __future__ import annotations

from dataclasses import dataclass

from gsm.errors import InputError
from gsm.measure.bench import PLAIN, resolve_arms
from gsm.measure.bench.arms import LINEAR

WEIGHT_LEVERS = (LINEAR, "bfloat16", "batch")
DEFAULT_LEVERS = ("tiers", "sparse", "sparse-int4", *WEIGHT_LEVERS)


@dataclass(frozen=True)
class ProbeSpec:
    """One request of ``batch_size`` sequences, and the levers whose gain is asked for.

    ``lengths`` are the contexts at which levers are predicted; empty: the request's own last one. ``levers`` are arms
    of `gsm bench`, config files, ``linear`` (GSM's linear layers alone; its arms include them), ``bfloat16``, or
    ``batch`` (8 sequences instead of one). ``verify`` measures what was predicted. Raises InputError for what makes no
    sense.
    """

    model: str
    prompt_tokens: int
    new_tokens: int = 1024
    batch_size: int = 1
    lengths: tuple[int, ...] = ()
    levers: tuple[str, ...] = DEFAULT_LEVERS
    verify: bool = False
    dtype: str = "float32"
    threads: int | None = None
    device: str = "cpu"
    text: str | None = None
    chunk_tokens: int = 1024
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "new_tokens", "batch_size", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if min(self.lengths, default=1) < 1:
            raise InputError(f"lengths are {self.lengths}; each must be at least 1")
        if self.wait_s < 0:
            raise InputError(f"wait_s is {self.wait_s}; it must not be negative")
        if PLAIN in self.levers:
            raise InputError(f"'{PLAIN}' is what levers are compared with; leave it out of --levers")
        for arm in resolve_arms(self.cache_levers) if self.cache_levers else ():
            if arm.config is not None and arm.config.smoothing.active:
                raise InputError(
                    f"lever '{arm.name}' smooths the model; `gsm smooth` judges that, leave it out of --levers"
                )

    @property
    def cache_levers(self) -> tuple[str, ...]:
        """The levers that are arms of `gsm bench` or config files."""
        return tuple(name for name in self.levers if name not in WEIGHT_LEVERS)
