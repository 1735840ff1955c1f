"""Where requests go and how they look: URL, API, model, headers and body fields of one arm."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from gsm.errors import ConfigError

Api = Literal["chat", "completions"]
_PATHS: dict[Api, str] = {"chat": "/chat/completions", "completions": "/completions"}
_SECRET_HEADERS = {"authorization", "proxy-authorization", "cookie", "api-key", "x-api-key"}


@dataclass(frozen=True)
class Target:
    """One OpenAI-compatible endpoint with everything that is the same for all requests to it."""

    url: str  # of the API's root, ends in /v1 or in another path the user gave
    api: Api = "chat"
    model: str | None = None  # None: the first one the server lists
    stream: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0
    usage_fields: Mapping[str, Any] = field(default_factory=lambda: {"include_usage": True})

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ConfigError(f"the timeout must be above 0 s, got {self.timeout_s}")
        if self.body.get("n", 1) != 1:
            raise ConfigError(f"body field n is {self.body['n']}; several choices share one stream, set n to 1")
        if "stream" in self.body:
            raise ConfigError("body field stream is set by the load tester; choose with --stream or --no-stream")

    @property
    def endpoint(self) -> str:
        return self.url + _PATHS[self.api]

    @property
    def shown_url(self) -> str:
        """The endpoint without credentials and query, fit for a report."""
        return without_credentials(self.endpoint)

    def describe(self) -> dict[str, Any]:
        """What a report may show: no value of a header that carries a secret."""
        headers = {name: "(hidden)" if is_secret_header(name) else value for name, value in self.headers.items()}
        return {"url": self.shown_url, "api": self.api, "model_id": self.model, "stream": self.stream} | {
            "headers": headers,
            "body": dict(self.body),
            "timeout_s": self.timeout_s,
        }


def without_credentials(url: str) -> str:
    """The URL with neither user and password nor query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def is_secret_header(name: str) -> bool:
    """Whether a header's value is a credential that no report may show."""
    return name.lower() in _SECRET_HEADERS


def parse_url(url: str, api: Api | None = None) -> tuple[str, Api]:
    """Root URL and API from what a user types: a host, a `/v1` root, or a full endpoint. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        valid = False
    if not valid:
        raise ConfigError(f"{url!r} is no http URL; write for example http://localhost:8000")
    if parts.query or parts.fragment:
        raise ConfigError(f"{url!r} carries a query or fragment; give the bare URL and use --header or --body")
    root = url.rstrip("/")
    for name, path in _PATHS.items():  # chat first: its path ends in the other's
        if root.endswith(path):
            if api not in (None, name):
                raise ConfigError(f"{url!r} is the {name} endpoint but --api says {api}; drop one of them")
            return root.removesuffix(path), name
    if not parts.path.strip("/"):
        root += "/v1"
    return root, api or "chat"


def parse_headers(items: tuple[str, ...] | list[str]) -> dict[str, str]:
    """`["X-Name: value", "X-Name=value"]` -> headers; raises ConfigError."""
    headers = {}
    for item in items:
        cut = min((at for at in (item.find(":"), item.find("=")) if at > 0), default=0)
        name, value = item[:cut].strip(), item[cut + 1 :].strip()
        if not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII) or any(ord(c) < 32 for c in value):
            raise ConfigError(f"{item!r} is no header; write NAME=VALUE")
        headers[name] = value
    return headers


def parse_body(items: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """`["temperature=0", "chat_template_kwargs.thinking=true"]` -> body fields; raises ConfigError.

    Values are JSON where they can be read as such and strings otherwise; dots descend into objects.
    """
    body: dict[str, Any] = {}
    for item in items:
        path, separator, text = item.partition("=")
        names = path.split(".")
        if not separator or not all(names):
            raise ConfigError(f"{item!r} is no body field; write NAME=VALUE or NAME.INNER=VALUE")
        _put(body, names, _json_or_text(text), item)
    return body


def is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


def parse_arm(target: Target, arm: str) -> Target:
    """One side of a comparison: a URL, or `header:NAME=VALUE` or `body:NAME=VALUE` on top of `target`."""
    if is_url(arm):
        url, api = parse_url(arm, target.api)
        return replace(target, url=url, api=api)
    kind, _, item = arm.partition(":")
    if kind not in ("header", "body"):
        raise ConfigError(f"arm {arm!r} is neither a URL nor header:NAME=VALUE nor body:NAME=VALUE")
    if kind == "header":
        return replace(target, headers={**target.headers, **parse_headers([item])})
    return replace(target, body=_merged(target.body, parse_body([item])))


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _put(body: dict[str, Any], names: list[str], value: Any, item: str) -> None:
    inner = body
    for name in names[:-1]:
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{item!r} descends into {name!r}, which already holds a plain value; set it once")
    inner[names[-1]] = value


def _merged(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """A deep merge that leaves both as they were; `extra` wins."""
    merged = dict(base)
    for name, value in extra.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
