"""Messages pass through the prompt pipeline on their way to the engine; efforts grade thoughts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Running, run_server
from transformers import AutoTokenizer

from gsm.arch import describe
from gsm.models import LoadedModel
from gsm.models.sources import resolve_source

LONG = "There are many ways to think about that. It often depends on how much time there is and on who helps. "
CONFIG = {
    "cache": {"hot_size": 64, "recent_tokens": 16},
    "reasoning": {"enabled": True, "min_tokens": 32},
    "prompt": {"dedup": {"mode": "exact"}},
}


@pytest.fixture(scope="module")
def running(tiny_model: Any) -> Iterator[Running]:
    tokenizer = AutoTokenizer.from_pretrained(str(resolve_source("demo")), local_files_only=True)
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=4096)
    with run_server(LoadedModel(model, tokenizer, "tiny", "tiny", describe(model.config)), CONFIG) as found:
        yield found


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=120, trust_env=False) as client:
        yield client


def ask(http: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    body = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
    return http.post("/v1/chat/completions", json=body)


def conversation(num_turns: int) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for turn in range(num_turns):
        turns += [{"role": "user", "content": f"And number {turn}?"}, {"role": "assistant", "content": LONG * 2}]
    return [*turns, {"role": "user", "content": "What now?"}]


def test_history_as_text_within_a_budget(http: httpx.Client) -> None:
    plain = ask(http, conversation(12), gsm={"prompt": {}}).json()["usage"]
    text = {"prompt": {"history": {"mode": "text", "budget_tokens": 300}}}
    usage = ask(http, conversation(12), gsm=text).json()["usage"]
    assert "removed_tokens" not in plain["prompt_tokens_details"]
    assert usage["prompt_tokens"] <= 300
    assert usage["prompt_tokens_details"]["removed_tokens"] > 300


def test_history_as_kv_keeps_the_prompt_and_frees_pages(http: httpx.Client, running: Running) -> None:
    before = running.engine.manager.counters["dropped"]
    plain = ask(http, conversation(12), gsm={"prompt": {}}).json()["usage"]
    assert running.engine.manager.counters["dropped"] == before
    kv = {"prompt": {"history": {"mode": "kv", "budget_tokens": 300}}}
    usage = ask(http, conversation(12), gsm=kv).json()["usage"]
    assert usage["prompt_tokens"] == plain["prompt_tokens"]
    assert running.engine.manager.counters["dropped"] > before
    assert usage["prompt_tokens_details"]["cached_tokens"] >= plain["prompt_tokens"] - 16
    running.wait_until_idle()
    assert running.used_pages() == 0


def test_the_servers_own_dedup_is_in_force_unless_a_request_says_otherwise(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": f"{LONG}\n\n{LONG}\n\nSo?"}]
    assert ask(http, messages).json()["usage"]["prompt_tokens_details"]["removed_tokens"] > 5
    off = ask(http, messages, gsm={"prompt": {}}).json()["usage"]
    assert "removed_tokens" not in off["prompt_tokens_details"]


def test_efforts_grade_and_unknown_ones_are_refused(http: httpx.Client, running: Running) -> None:
    thought = "<think>\n" + "I count the sheep in the field, one by one.\n\n" * 30 + "</think>\n\nTwelve."
    messages = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": thought},
        {"role": "user", "content": "Sure?"},
    ]
    dropped = []
    for effort in ("max", "high", "none"):
        before = running.engine.manager.counters["dropped"]
        assert ask(http, messages, reasoning_effort=effort).status_code == 200
        dropped.append(running.engine.manager.counters["dropped"] - before)
    assert 0 < dropped[0] < dropped[1] < dropped[2]
    answer = ask(http, messages, reasoning_effort="huge")
    assert answer.status_code == 400
    assert "use none, low, high, max or a number" in answer.json()["error"]["message"]


def test_wrong_options_are_refused(http: httpx.Client) -> None:
    answer = ask(http, conversation(1), gsm={"prompt": {"history": {"mode": "text", "budget": 3}}})
    assert answer.status_code == 400
    assert "budget" in answer.json()["error"]["message"]
