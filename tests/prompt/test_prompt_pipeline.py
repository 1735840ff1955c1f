"""Segments, spans and traces through the demo model's template and through unkind ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from prompt_cases import chat, demo_tokenizer

from gsm.config.prompt import PromptConfig
from gsm.errors import InputError
from gsm.prompt import Place, PromptPipeline
from gsm.prompt.pipeline import token_finder
from gsm.prompt.spans import Draft, Piece, build, keep

THINK_STRIPPING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[-1].strip() }}{% else %}{{ m['content'] | trim }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = (
    "<|im_start|>system\n{{ messages[0]['content'] }}{% if tools %}\n# Tools\n{% for t in tools %}{{ t | tojson }}\n"
    "{% endfor %}{% endif %}<|im_end|>\n{% for m in messages[1:] %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}"
)


def tokenizer_with(template: str) -> Any:
    tokenizer = copy.copy(demo_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def test_segments_cover_the_text_and_know_their_tokens() -> None:
    messages = chat("Hello there", "<think>He greets.</think>Hi!", "Passage 1: Cats sleep.\n\nWhat do cats do?")
    prompt = PromptPipeline(demo_tokenizer()).process(messages)
    assert "".join(prompt.text[s.start : s.end] for s in prompt.segments) == prompt.text
    assert [s.kind for s in prompt.segments if s.kind != "template"] == [
        "system", "user", "think", "assistant", "document", "last_user",
    ]  # fmt: skip
    tokenizer = demo_tokenizer()
    for segment in prompt.segments:
        spelled = tokenizer.decode(prompt.ids[segment.first : segment.last])
        assert prompt.text[segment.start : segment.end].strip() in spelled
    assert prompt.ids == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    grades = {s.kind: s.grade for s in prompt.segments}
    assert grades["think"] == "fading"
    assert grades["system"] == grades["last_user"] == "protected"
    assert grades["assistant"] == "normal"


def test_every_character_is_traced_to_its_tokens_and_back() -> None:
    messages = chat("What is 今日は🙂?", "It is fine.", "Thanks")
    prompt = PromptPipeline(demo_tokenizer()).process(messages)
    for number, message in enumerate(messages):
        for char, letter in enumerate(message["content"]):
            trace = prompt.trace(number, char)
            assert trace.how == "kept"
            assert trace.tokens is not None
            first, last = trace.tokens
            spelled = demo_tokenizer().decode(prompt.ids[first:last])
            assert letter in spelled or letter == "🙂"
            if letter.isascii():
                assert any(place.message == number for place in prompt.origins(first))


def test_a_template_that_strips_thinking_is_seen_through() -> None:
    messages = chat("  padded question  ", "<think>secret plan</think>\n\nThe answer.", "Next")
    prompt = PromptPipeline(tokenizer_with(THINK_STRIPPING)).process(messages)
    assert "secret" not in prompt.text
    at = messages[2]["content"].index("secret")
    assert prompt.trace(2, at).how == "dropped"
    assert "template" in prompt.trace(2, at).reason
    answer = prompt.trace(2, messages[2]["content"].index("The answer"))
    assert answer.tokens is not None
    assert "The" in demo_tokenizer().decode(prompt.ids[answer.tokens[0] : answer.tokens[1]])
    assert any(message == 2 for message, _, _ in prompt.rendered.dropped)


def test_tools_are_a_segment_of_their_own() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    prompt = PromptPipeline(tokenizer_with(WITH_TOOLS)).process(chat("Rain?"), open_answer=False, tools=tools)
    found = [s for s in prompt.segments if s.kind == "tools"]
    assert len(found) == 1
    assert "weather" in prompt.text[found[0].start : found[0].end]
    assert found[0].grade == "protected"


def test_two_rewrites_compose() -> None:
    messages = chat("aaa bbb ccc")
    text = messages[1]["content"]
    first = build(
        messages,
        [
            Draft(messages[0], [keep(0, messages[0]["content"])]),
            Draft(messages[1], [keep(1, text, 0, 4), Piece("B ", None, (Place(1, 4, 8),)), keep(1, text, 8)]),
        ],
        "one",
    )
    assert first.messages[1]["content"] == "aaa B ccc"
    second = build(first.messages, [Draft(first.messages[1], [keep(1, "aaa B ccc", 4)])], "two")
    assert second.messages[0]["content"] == "B ccc"
    both = first.spans.then(second.spans)
    assert both.find(0, 0).how == "removed"  # type: ignore[union-attr]
    assert both.find(1, 1).how == "removed"  # type: ignore[union-attr]
    middle, end = both.find(1, 5), both.find(1, 9)
    assert middle is not None
    assert middle.how == "replaced"
    assert middle.reason == "one"
    assert middle.new == Place(0, 0, 2)
    assert end is not None
    assert end.how == "kept"
    assert both.origins(0, 3) == [Place(1, 9, 10)]


def test_tokens_of_spliced_ids_are_found_by_decoding() -> None:
    prompt = PromptPipeline(demo_tokenizer()).process(chat("Where is the 🙂 cat now?", "There", "Ok then"))
    find = token_finder(demo_tokenizer(), prompt.ids)
    for segment in prompt.segments:
        assert find(segment.start, segment.end) == (segment.first, segment.last)


def test_no_template_is_said() -> None:
    tokenizer = tokenizer_with("")
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        PromptPipeline(tokenizer, PromptConfig()).process(chat("x"))
