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
    """Limits protect the server from one client; `api_keys` empty lets everybody in, `admin_keys` empty nobody."""

    model_name: str
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None  # None: the model's window
    max_request_s: float = 600.0
    max_prompts: int = 64  # of one completions request
    admin_keys: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if any(len(key) < _MIN_KEY for key in (*self.api_keys, *self.admin_keys)):
            raise ConfigError(f"an API key is shorter than {_MIN_KEY} characters; use a longer one")
        if set(self.api_keys) & set(self.admin_keys):
            raise ConfigError("an admin key is among the API keys; give administrators a key of their own")

    def tenant_of(self, authorization: str | None) -> str | None:
        """A name for the key of a request (never the key itself); "" where none is needed, None where it is wrong."""
        if not self.api_keys:
            return ""
        given = _bearer(authorization)
        found = None
        for key in self.api_keys:  # every key is compared, so that the time tells nothing
            if hmac.compare_digest(given, key.encode()):
                found = hashlib.sha256(given).hexdigest()[:16]
        return found

    def is_admin(self, authorization: str | None) -> bool:
        """Whether a request carries an admin key; False for everybody where none is set."""
        given = _bearer(authorization)
        return any([hmac.compare_digest(given, key.encode()) for key in self.admin_keys])


def _bearer(authorization: str | None) -> bytes:
    return (authorization or "").removeprefix("Bearer ").strip().encode("utf-8", "surrogateescape")


def read_keys(lines: Sequence[str]) -> tuple[str, ...]:
    """Keys from a file's lines; blank ones and comments are left out."""
    return tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
