"""Every cause is found, named and worth its remedy; clean prompts are left in peace."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prompt_cases import chat, demo_tokenizer

from gsm.config.reasoning import MARKERS
from gsm.errors import InputError
from gsm.prompt.lint import Conversation, Linter, LintReport
from gsm.prompt.lint_files import read_conversations

LONG = "There are many ways to think about that, and it often depends on how much time there is for it. " * 3
TEMPLATE = (
    "{% if reasoning_effort %}Reasoning effort: {{ reasoning_effort }}\n{% endif %}"
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("a", "b")]


def lint(*conversations: Conversation, template: str | None = TEMPLATE) -> LintReport:
    tokenizer = copy.copy(demo_tokenizer())
    tokenizer.chat_template = template or tokenizer.chat_template
    return Linter(tokenizer, MARKERS).lint(conversations)


def causes(report: LintReport) -> list[str]:
    return [finding.cause for finding in report.findings]


def test_a_clean_conversation_and_a_clean_log() -> None:
    messages = chat("One?", LONG, "Two?", LONG, "Three?", system=LONG)
    assert causes(lint(Conversation(messages))) == []
    log = [Conversation(chat(f"Question {i}?", system=LONG)) for i in range(4)]
    report = lint(*log)
    assert causes(report) == []
    assert report.hit_rate == report.hit_rate_after > 0.5


def test_stripped_thoughts() -> None:
    messages = chat("One?", f"<think>\n{LONG}</think>\n\nYes.", "Two?", "Ok.", "Three?")
    (finding,) = lint(Conversation(messages)).findings
    assert "drops thoughts" in finding.cause
    assert finding.lost_tokens > 40


@pytest.mark.parametrize(
    ("text", "other", "name"),
    [
        ("Today is 2026-11-30T04:05:06Z.", "Today is 2026-12-01T09:05:06Z.", "a date or time"),
        ("Session id: session-8f3a91.", "Session id: session-77b3d2.", "an id"),
        ("Request 123e4567-e89b-12d3-a456-426614174000.", "Request 923e4567-e89b-12d3-a456-426614174111.", "an id"),
        ("The time is 14:05.", "The time is 15:06.", "a time"),
        ("It is 30 November 2026.", "It is 1 December 2026.", "a date"),
        ("Now: 1764475200.", "Now: 1764479999.", "a time stamp"),
    ],
)
def test_what_varies_in_front(text: str, other: str, name: str) -> None:
    log = [Conversation(chat("Hi?", system=f"{system} {LONG}")) for system in (text, other, text, other)]
    report = lint(*log)
    assert causes(report) == [f"{name} in the system prompt"]
    assert report.hit_rate_after > report.hit_rate


def test_tools_in_another_order_and_other_tools() -> None:
    messages = chat("Hi?", system=LONG)
    report = lint(Conversation(messages, {"tools": TOOLS}), Conversation(messages, {"tools": TOOLS[::-1]}))
    assert causes(report) == ["the same tools in another order"]
    assert report.hit_rate == 0 < report.hit_rate_after
    report = lint(Conversation(messages, {"tools": TOOLS}), Conversation(messages, {"tools": TOOLS[:1]}))
    assert causes(report) == ["different tools"]


def test_the_effort_line_comes_first() -> None:
    messages = chat("Hi?", system=LONG)
    efforts = ("low", "high", "low", "max")
    report = lint(*(Conversation(messages, {"reasoning_effort": effort}) for effort in efforts))
    assert causes(report)[0].startswith("the reasoning effort (")
    assert report.hit_rate_after > report.hit_rate


def test_history_that_moves() -> None:
    whole = chat(*[f"{i} {LONG}" for i in range(9)], system=LONG)
    cut = [whole[0], *whole[3:]]
    report = lint(Conversation(whole[:-2]), Conversation(cut))
    assert causes(report) == ["early turns were cut off at the front"]
    changed = [*whole[:2], {**whole[2], "content": "Edited."}, *whole[3:]]
    assert causes(lint(Conversation(whole[:-2]), Conversation(changed))) == ["an earlier turn was changed"]
    inserted = [*whole[:2], {"role": "user", "content": "News: nothing."}, *whole[2:]]
    assert causes(lint(Conversation(whole[:-2]), Conversation(inserted))) == [
        "something was inserted before earlier turns"
    ]


def test_trimmed_answers_and_other_splits() -> None:
    trimming = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    messages = chat("One?", f"Well.{' ' * 8}\n\n\n\n", "Two?")
    report = lint(Conversation(messages), template=trimming + "{{ '<|im_start|>assistant\n' }}")
    assert causes(report) == [
        "an answer's text is split into other tokens than were generated, or trimmed by the template"
    ]


def test_files(tmp_path: Path) -> None:
    one, log, bad = tmp_path / "one.json", tmp_path / "log.jsonl", tmp_path / "bad.jsonl"
    one.write_text(json.dumps(chat("Hi")))
    bodies: list[dict[str, Any]] = [{"model": "m", "messages": chat("Hi"), "tools": TOOLS}]
    bodies.append({"custom_id": "1", "body": {"messages": chat("Hi"), "reasoning_effort": "low"}})
    log.write_text("\n".join(map(json.dumps, bodies)))
    assert read_conversations(one)[0].messages == chat("Hi")
    first, second = read_conversations(log)
    assert first.tools == TOOLS
    assert second.template == {"reasoning_effort": "low"}
    bad.write_text('{"messages": []}\n{"x": 1}')
    with pytest.raises(InputError, match="line 1 has no messages"):
        read_conversations(bad)
    bad.write_text('{"messages": [')
    with pytest.raises(InputError, match="neither JSON nor JSON lines"):
        read_conversations(bad)
    with pytest.raises(InputError, match="does not exist"):
        read_conversations(tmp_path / "none")


def test_the_command(tmp_path: Path) -> None:
    from gsm.cli.lint_prompt import command

    file, result = tmp_path / "one.json", tmp_path / "result.json"
    file.write_text(json.dumps(chat("Hi", LONG, "And?", system="Today is 2026-11-30.")))
    outcome = CliRunner().invoke(command, [str(file), "--json", str(result)], standalone_mode=False)
    assert outcome.return_value == 1, outcome.output
    assert "a date or time in the system prompt" in outcome.output
    assert json.loads(result.read_text())["num_requests"] == 2
    file.write_text(json.dumps(chat("Hi", LONG, "And?")))
    assert CliRunner().invoke(command, [str(file)], standalone_mode=False).return_value == 0
