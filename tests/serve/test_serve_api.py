"""The API as the official client, LangChain and curl see it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from serving import Running

CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Name the capital of France."}],
    "temperature": 0,
    "max_tokens": 12,
}


@pytest.fixture
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{running.url}/v1", api_key="unused", max_retries=0, http_client=httpx.Client(trust_env=False)
    )


def test_chat_whole_and_streamed_agree(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    assert "Paris" in whole.choices[0].message.content
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completion_with_ids_logprobs_and_stop(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="1 2 3 4 5 6", temperature=0, max_tokens=8, logprobs=2)
    assert answer.choices[0].text.startswith(" 7 8")
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
    assert all(len(top) == 2 for top in answer.choices[0].logprobs.top_logprobs)
    stopped = client.completions.create(
        model="demo", prompt="1 2 3 4 5 6", temperature=0, max_tokens=16, stop=[" 9", "never"]
    )
    assert stopped.choices[0].text == " 7 8"
    assert stopped.choices[0].finish_reason == "stop"


def test_several_prompts_and_choices_are_numbered(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=["The sky is", "Grass is"], n=2, temperature=1.0, seed=3, max_tokens=4
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    again = client.completions.create(
        model="demo", prompt=["The sky is", "Grass is"], n=2, temperature=1.0, seed=3, max_tokens=4
    )
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]
    assert len({c.text for c in answer.choices}) > 2


def test_the_next_turn_hits_the_prefix_with_generated_ids(client: openai.OpenAI, running: Running) -> None:
    messages = [{"role": "user", "content": "Tell me a long story about a fox. " * 8}]
    first = client.chat.completions.create(
        model="demo", messages=messages, temperature=1.0, seed=7, max_tokens=60, extra_body={"ignore_eos": False}
    )
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Go on."},
    ]
    second = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=4)
    cached = second.usage.prompt_tokens_details.cached_tokens
    page = running.engine.config.cache.page_size
    computed = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert cached >= computed // page * page - page


def test_salts_do_not_share_prefixes(client: openai.OpenAI) -> None:
    prompt = "A shared beginning of many words, " * 8

    def cached(salt: str | None) -> int:
        body = {} if salt is None else {"cache_salt": salt}
        answer = client.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=1, extra_body=body)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0
    assert cached("on") == 0


def test_langchain(running: Running) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="demo",
        base_url=f"{running.url}/v1",
        api_key="unused",
        temperature=0,
        max_tokens=8,
        max_retries=0,
        http_client=httpx.Client(trust_env=False),
    )
    assert "Paris" in str(model.invoke("Name the capital of France.").content)
    assert "".join(str(chunk.content) for chunk in model.stream("Say hello."))


def test_models_health_metrics(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["data"][0]["id"] == "demo"
    assert http.get("/v1/models/demo").json()["id"] == "demo"
    assert http.get("/v1/models/other").status_code == 404
    assert http.get("/health").json() == {"status": "ok"}
    text = http.get("/metrics").text
    for name in ("num_requests_running", "generation_tokens_total", "time_to_first_token_seconds_bucket"):
        assert f"gsm:{name}" in text


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"model": "other"}, 404, "other"),
        ({"messages": []}, 400, "messages"),
        ({"temperature": 9}, 400, "temperature"),
        ({"unknown_field": 1}, 400, "unknown_field"),
        ({"max_tokens": 10**6}, 400, "max_tokens"),
        ({"stop": ""}, 400, "stop"),
        ({"n": 0}, 400, "n"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "tokens"),
        ({"gsm": {"sparse": {"budget": 3}}}, 400, "budget"),
    ],
    ids=str,
)
def test_wrong_requests_are_told_in_one_sentence(
    http: httpx.Client, change: dict[str, Any], status: int, word: str
) -> None:
    response = http.post("/v1/chat/completions", json=CHAT | change)
    assert response.status_code == status
    assert word in response.json()["error"]["message"]
    assert http.get("/health").status_code == 200


def test_bytes_that_are_no_json(http: httpx.Client) -> None:
    assert http.post("/v1/chat/completions", content=b"\xff{").status_code == 400
    assert http.post("/v1/chat/completions", content=b"[1]").status_code == 400


def test_deltas_of_emoji_and_cjk_join_to_the_whole(http: httpx.Client, running: Running) -> None:
    tokenizer = running.engine.loaded.tokenizer
    text = "日本語 😀👩‍👩‍👧 ok é"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    from gsm.engine.detokenize import Detokenizer

    pieces = Detokenizer(tokenizer, [])
    parts = [pieces.feed([i]) for i in ids] + [pieces.finish()]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_stream_is_valid_sse(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: ")) for line in lines[:-1])
