"""Repeated passages go once, facts never."""

from __future__ import annotations

import pytest
from prompt_cases import chat

from gsm.config.prompt import DedupConfig
from gsm.prompt.dedup import deduplicate

CATS = "Cats sleep for most of the day and hunt at dawn, when small animals are awake and the light is low."
DOGS = "Dogs were domesticated before any other animal and still live with people all over the inhabited world."
EXACT = DedupConfig(mode="exact")
NEAR = DedupConfig(mode="near")


def test_off_changes_nothing() -> None:
    messages = chat(f"{CATS}\n\n{CATS}\n\nWhy?")
    edited, report = deduplicate(messages, DedupConfig())
    assert edited.messages == messages
    assert report.repeats == ()


def test_the_second_of_two_equal_passages_is_a_reference() -> None:
    messages = chat(f"Passage 1: {CATS}\n\nPassage 2: {DOGS}\n\nPassage 3: {CATS}\n\nWhy do cats sleep?")
    edited, report = deduplicate(messages, EXACT)
    content = edited.messages[1]["content"]
    assert content == (
        f"Passage 1: {CATS}\n\nPassage 2: {DOGS}\n\nPassage 3: (same as Passage 1)\n\nWhy do cats sleep?"
    )
    assert len(report.repeats) == 1
    link = edited.spans.find(1, messages[1]["content"].rindex("hunt"))
    assert link is not None
    assert (link.how, link.reason) == ("replaced", "duplicate")
    assert link.new is not None
    assert content[link.new.start : link.new.end] == "Passage 3: (same as Passage 1)"


def test_across_messages_but_not_across_efforts() -> None:
    messages = chat(f"{CATS}\n\nRead it.", "Done.", f"{CATS}\n\nWhy?")
    edited, _ = deduplicate(messages, EXACT)
    assert edited.messages[3]["content"] == '(repeats "Cats sleep for most...")\n\nWhy?'
    messages[1]["reasoning_effort"] = "low"
    messages[3]["reasoning_effort"] = "max"
    edited, report = deduplicate(messages, EXACT)
    assert edited.messages == messages
    assert report.repeats == ()


def test_near_passages_need_the_same_numbers_and_names() -> None:
    near = CATS.replace("small animals", "small animals often")
    _, report = deduplicate(chat(f"{CATS}\n\n{near}\n\nWhy?"), DedupConfig(mode="near", similarity=0.6))
    assert len(report.repeats) == 1
    assert report.repeats[0].similarity < 1
    price = "The ticket from Rome to the old harbour costs 45 euros in summer and is sold at every station there."
    for other in (price.replace("45", "54"), price.replace("Rome", "Oslo"), price.replace("is sold", "is not sold")):
        _, report = deduplicate(chat(f"{price}\n\n{other}\n\nHow much?"), DedupConfig(mode="near", similarity=0.5))
        assert report.repeats == ()
    _, report = deduplicate(chat(f"{CATS}\n\n{near}\n\nWhy?"), EXACT)
    assert report.repeats == ()


def test_code_and_tables_stay_unless_asked() -> None:
    code = "```python\n" + "\n\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(4)) + "\n```"
    table = "\n".join(f"| row {i} | value {i} | and more {i} |" for i in range(4))
    messages = chat(f"{code}\n\n{table}\n\n{code}\n\n{table}\n\nExplain.")
    _, report = deduplicate(messages, EXACT)
    assert report.repeats == ()
    _, report = deduplicate(messages, DedupConfig(mode="exact", code=True))
    assert len(report.repeats) == 2


def test_system_prompt_question_and_short_blocks_stay() -> None:
    messages = chat(CATS, "Yes.", f"ok\n\nok\n\n{CATS}", system=CATS)
    edited, report = deduplicate(messages, EXACT)
    assert edited.messages == messages
    assert report.repeats == ()


def test_deterministic_and_idempotent() -> None:
    messages = chat("\n\n".join([CATS, DOGS, CATS, DOGS, "Which?"]))
    first, _ = deduplicate(messages, NEAR)
    again, _ = deduplicate(messages, NEAR)
    assert first == again
    twice, report = deduplicate(first.messages, NEAR)
    assert twice.messages == first.messages
    assert report.repeats == ()


def test_near_without_the_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from gsm.errors import InputError

    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(InputError, match=r"gsm-infer\[prompt\]"):
        deduplicate(chat(CATS), NEAR)
