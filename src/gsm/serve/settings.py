"""What `gsm serve` was told beside the model and the config."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from gsm.errors import ConfigError

_MIN_KEY = 8  # characters; shorter ones are guessed


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Limits protect the server from one client; `api_keys` empty lets everybody in."""

    model_name: str
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None  # None: the model's window
    max_request_s: float = 600.0
    max_prompts: int = 64  # of one completions request

    def __post_init__(self) -> None:
        if any(len(key) < _MIN_KEY for key in self.api_keys):
            raise ConfigError(f"an API key is shorter than {_MIN_KEY} characters; use a longer one")

    def tenant_of(self, authorization: str | None) -> str | None:
        """A name for the key of a request (never the key itself); "" where none is needed, None where it is wrong."""
        if not self.api_keys:
            return ""
        given = (authorization or "").removeprefix("Bearer ").strip().encode()
        found = None
        for key in self.api_keys:  # every key is compared, so that the time tells nothing
            if hmac.compare_digest(given, key.encode()):
                found = hashlib.sha256(given).hexdigest()[:16]
        return found


def read_keys(lines: Sequence[str]) -> tuple[str, ...]:
    """Keys from a file's lines; blank ones and comments are left out."""
    return tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
