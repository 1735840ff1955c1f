"""Conversations from files: one request, a list of messages, or a log with one request per line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gsm.errors import InputError
from gsm.prompt.lint import Conversation
from gsm.results import read_text

_TEMPLATE_FIELDS = ("tools", "reasoning_effort")
_ENVELOPES = ("body", "request", "payload")  # where logs and batch files keep the request itself


def read_conversations(path: str | Path) -> list[Conversation]:
    """All conversations of a JSON or JSON-lines file. Raises InputError naming the line that is none."""
    source = Path(path)
    text = read_text(source, "prompt file")
    found = [_conversation(item, f"{source}, {where}") for where, item in _items(text, source)]
    if not found:
        raise InputError(f"prompt file {source} is empty; give a request with messages, or one per line")
    return found


def _items(text: str, source: Path) -> list[tuple[str, Any]]:
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        return [(f"line {n}", _line(line, source, n)) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if isinstance(whole, list) and whole and not (isinstance(whole[0], dict) and "role" in whole[0]):
        return [(f"item {n}", item) for n, item in enumerate(whole, 1)]
    return [("its content", whole)] if whole else []


def _line(line: str, source: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{source} is neither JSON nor JSON lines (line {number}: {error.msg})") from None


def _conversation(item: Any, where: str) -> Conversation:
    for name in _ENVELOPES:
        if isinstance(item, dict) and "messages" not in item and isinstance(item.get(name), dict):
            item = item[name]
    body: dict[str, Any] = {"messages": item} if isinstance(item, list) else item
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise InputError(f"{where} has no messages with roles; give requests as chat clients send them")
    template = dict(body.get("chat_template_kwargs") or {})
    template |= {name: body[name] for name in _TEMPLATE_FIELDS if body.get(name) is not None}
    return Conversation(messages, template)
