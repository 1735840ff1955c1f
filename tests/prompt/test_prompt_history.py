"""Old turns within a budget: what stays, what is said again, and what a prefix survives."""

from __future__ import annotations

import time
from typing import Any

from prompt_cases import chat, demo_tokenizer

from gsm.config.prompt import HistoryConfig, PromptConfig
from gsm.prompt import PromptPipeline
from gsm.prompt.history import TextHistory

FILLER = (
    "There are many ways to think about that. It often depends on how much time there is. In general it helps to begin "
    "with something small. After that things usually become easier. Most people find that a routine is useful here."
)
FACT = "By the way, my dog is called Biscuit and he is afraid of thunder."


def long_chat(num_turns: int, last: str = "What is my dog called?") -> list[dict[str, Any]]:
    contents = []
    for turn in range(num_turns - 1):
        contents += [f"What about number {turn}, how do I begin?" if turn != 1 else FACT, FILLER]
    return chat(*contents, last)


def pipeline(**settings: Any) -> PromptPipeline:
    history = {"mode": "text", "budget_tokens": 300, "low_water": 0.5, **settings}
    return PromptPipeline(demo_tokenizer(), PromptConfig(history=HistoryConfig.model_validate(history)))


def test_below_the_budget_nothing_changes() -> None:
    messages = long_chat(4)
    prompt = pipeline(budget_tokens=2000).process(messages)
    assert prompt.messages == messages
    assert prompt.history.num_cuts == 0
    assert prompt.history.num_tokens_before == prompt.history.num_tokens_after


def test_budget_protection_and_the_fact() -> None:
    messages = long_chat(12)
    prompt = pipeline().process(messages)
    assert len(prompt.ids) <= 300
    assert prompt.messages[0] == messages[0]
    assert prompt.messages[-1]["content"].endswith(messages[-1]["content"])
    assert "Biscuit" in prompt.text
    assert prompt.history.num_tokens_after < prompt.history.num_tokens_before / 2
    # no message ends up between two of the same role
    roles = [message["role"] for message in prompt.messages]
    assert roles == ["system", *(("user", "assistant") * len(roles))[: len(roles) - 1]]


def test_everything_is_traced() -> None:
    messages = long_chat(12)
    prompt = pipeline().process(messages)
    for number, message in enumerate(messages):
        for char in range(0, len(message["content"]), 7):
            trace = prompt.trace(number, char)
            if trace.how == "removed":
                assert trace.reason == "history"
            else:
                assert trace.tokens is not None
    assert any(prompt.trace(2, char).how == "removed" for char in range(len(FILLER)))


def test_a_sentence_that_went_is_quoted_when_it_is_asked_for() -> None:
    dull = "The thing in the corner was blue when it rained."
    contents = [dull, FILLER]
    for turn in range(10):
        contents += [f"My number is {turn}{turn} and my name is Anna {turn}.", FILLER]
    prompt = pipeline(low_water=0.3).process(chat(*contents, "Which thing was in the corner when it rained?"))
    last = prompt.messages[-1]["content"]
    assert last.startswith("(Earlier I said: The thing in the corner")
    assert last.endswith("\n\nWhich thing was in the corner when it rained?")
    assert prompt.trace(1, 4).how == "replaced"
    without = pipeline(low_water=0.3, recall_tokens=0).process(chat(*contents, "Which thing was in the corner?"))
    assert "Earlier" not in without.messages[-1]["content"]


def test_the_next_prompt_begins_with_this_one_unless_something_had_to_go() -> None:
    compressor = pipeline(budget_tokens=800)
    whole = long_chat(24)
    shared, total, cuts = 0, 0, 0
    before: list[int] = []
    for turn in range(1, 24):
        messages = whole[: 2 * turn]
        prompt = compressor.process(messages)
        same = next((i for i, (a, b) in enumerate(zip(before, prompt.ids, strict=False)) if a != b), len(before))
        cuts += same < len(before) - 4
        shared, total = shared + min(same, len(prompt.ids)), total + len(prompt.ids)
        answer = whole[2 * turn]["content"] + "<|im_end|>\n"
        before = prompt.ids + list(demo_tokenizer()(answer, add_special_tokens=False)["input_ids"])
        assert compressor.process(messages).ids == prompt.ids
    assert 1 <= cuts <= 6
    assert shared / total > 0.8


def test_tool_calls_keep_their_results() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    result = {"role": "tool", "content": FILLER, "tool_call_id": "1"}
    messages = [*long_chat(3)[:-1], {"role": "user", "content": "Look it up."}, call, result]
    messages += [{"role": "assistant", "content": FILLER}, *long_chat(8)[1:]]
    history = TextHistory(HistoryConfig(mode="text", budget_tokens=300), lambda text: len(text) // 4, 6)
    edited, report = history.compress(messages)
    assert report.num_cuts
    numbers = [i for i, m in enumerate(edited.messages) if m.get("tool_calls")]
    assert len(numbers) == 1
    assert edited.messages[numbers[0] + 1]["role"] == "tool"
    # an open call after the last user message is untouched
    opened = [*messages, call, {"role": "tool", "content": FILLER * 3, "tool_call_id": "1"}]
    edited, _ = history.compress(opened)
    assert edited.messages[-1]["content"] == FILLER * 3


def test_summariser_cache_limit_and_fall_back() -> None:
    config = HistoryConfig(mode="text", budget_tokens=300)
    calls = []

    def summarise(messages: list[dict[str, Any]], max_tokens: int) -> str:
        calls.append(max_tokens)
        return "The user has a dog called Biscuit."

    def count(text: str) -> int:
        return len(text) // 4

    history = TextHistory(config, count, 6, summarise)
    edited, report = history.compress(long_chat(12))
    assert "The user has a dog called Biscuit." in edited.messages[1]["content"]
    assert report.fell_back == ""
    num_calls = len(calls)
    assert history.compress(long_chat(12))[0] == edited
    assert len(calls) == num_calls

    def fails(messages: list[dict[str, Any]], max_tokens: int) -> str:
        raise RuntimeError("no model")

    extracted, report = TextHistory(config, count, 6, fails).compress(long_chat(12))
    assert "RuntimeError: no model" in report.fell_back
    assert extracted == TextHistory(config, count, 6).compress(long_chat(12))[0]

    def sleeps(messages: list[dict[str, Any]], max_tokens: int) -> str:
        time.sleep(1.0)
        return "late"

    _, report = TextHistory(config, count, 6, sleeps, time_limit_s=0.01).compress(long_chat(6))
    assert "longer than 0.01 s" in report.fell_back


def test_kv_mode_names_token_ranges_and_changes_no_text() -> None:
    messages = long_chat(12)
    prompt = pipeline(mode="kv").process(messages)
    assert prompt.messages == messages
    (start, end), *rest = prompt.lowered
    assert rest == []
    lowered = demo_tokenizer().decode(prompt.ids[start:end])
    assert lowered.startswith("What about number 0")
    assert "my dog called" not in lowered
    assert len(prompt.ids) - (end - start) <= 304
    system = next(s for s in prompt.segments if s.kind == "system")
    assert start >= system.last
