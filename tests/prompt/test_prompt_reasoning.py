"""Think segments and steps, found token by token."""

from __future__ import annotations

import pytest
from prompt_cases import demo_tokenizer

from gsm.config import load_config
from gsm.config.reasoning import DISCOURSE, MARKERS, ReasoningConfig
from gsm.errors import ConfigError
from gsm.prompt import ThinkTracker

TEXT = (
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n<think>\nLet me see. The sum is needed.\n\n"
    "Two and two are four. Wait, is it? So yes.\n</think>\n\nIt is 4."
)


def tracker(markers: tuple[tuple[str, str], ...] = MARKERS) -> ThinkTracker:
    return ThinkTracker(demo_tokenizer(), markers, DISCOURSE)


def ids_of(text: str) -> list[int]:
    return list(demo_tokenizer()(text, add_special_tokens=False)["input_ids"])


def spelled(ids: list[int], span: tuple[int, int]) -> str:
    return str(demo_tokenizer().decode(ids[span[0] : span[1]]))


def test_steps_by_blank_lines_and_discourse() -> None:
    ids, found = ids_of(TEXT), tracker()
    assert found.feed(ids)
    assert not found.is_thinking
    (thought,) = found.thoughts
    steps = [spelled(ids, span) for span in thought.finished_steps()]
    assert steps == [
        "\nLet me see. The sum is needed.\n\n", "Two and two are four.", " Wait, is it?", " So yes.\n",
    ]  # fmt: skip
    assert "".join(steps) == TEXT[TEXT.index("<think>") + 7 : TEXT.index("</think>")]
    assert len(steps) == 4


def test_one_by_one_is_the_same_and_crops_go_back() -> None:
    ids = ids_of(TEXT)
    whole = tracker()
    whole.feed(ids)
    single = tracker()
    for index, token_id in enumerate(ids):
        single.feed([token_id])
        fresh = tracker()
        fresh.feed(ids[: index + 1])
        assert fresh.thoughts == single.thoughts
    assert single.thoughts == whole.thoughts
    for length in range(len(ids), -1, -3):
        single.crop(length)
        fresh = tracker()
        fresh.feed(ids[:length])
        assert single.thoughts == fresh.thoughts
        assert single.num_tokens == length
    single.feed(ids[single.num_tokens :])
    assert single.thoughts == whole.thoughts


def test_a_marker_that_a_user_writes_is_no_thought() -> None:
    text = "<|im_start|>user\nWhat does <think> do?<|im_end|>\n<|im_start|>assistant\nIt opens a thought."
    found = tracker()
    found.feed(ids_of(text))
    assert found.thoughts == []


def test_other_families() -> None:
    for opening, closing in MARKERS:
        found = tracker()
        ids = ids_of(f"x {opening}One step.\n\nAnother step.{closing} done")
        found.feed(ids)
        (thought,) = found.thoughts
        # the last full stop may share a token with the marker
        assert [spelled(ids, s).strip(" .\n") for s in thought.finished_steps()] == ["One step", "Another step"]


def test_a_thought_that_runs_is_not_over() -> None:
    found = tracker()
    ids = ids_of("<think>One.\n\nTwo")
    found.feed(ids)
    assert found.is_thinking
    (thought,) = found.thoughts
    assert thought.end is None
    assert len(thought.finished_steps()) == 1
    twin = found.copy()
    twin.feed(ids_of("</think>"))
    assert not twin.is_thinking
    assert found.is_thinking


def test_efforts() -> None:
    config = ReasoningConfig()
    keeps = [config.level(effort).keep for effort in ("none", 25, "low", 60, "high", 90, "max")]
    assert keeps == sorted(keeps)
    assert config.level("medium") == config.level(75) == config.level("high") == config.level()
    assert config.level(100) == config.max
    assert config.level("none").keep == 0
    with pytest.raises(ConfigError, match="reasoning effort 'huge' is unknown"):
        load_config({"reasoning": {"effort": "huge"}})
    with pytest.raises(ConfigError, match="empty marker"):
        load_config({"reasoning": {"markers": [["", "x"]]}})
