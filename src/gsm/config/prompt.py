"""The prompt section: what happens to messages before they become tokens. Everything is off unless asked for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gsm.config.section import Section


class DedupConfig(Section):
    """Repeated passages of one prompt: kept once, referred to afterwards."""

    mode: Literal["off", "exact", "near"] = "off"
    similarity: float = Field(default=0.8, gt=0.0, le=1.0, description="Jaccard similarity of word shingles (near)")
    min_words: int = Field(default=12, ge=4, description="shorter passages stay: a reference would be as long")
    code: bool = Field(default=False, description="code and tables too")


class HistoryConfig(Section):
    """Old turns within a budget: as text (sentences chosen, or a summary), or as KV (old pages lowered or dropped).

    Once a prompt exceeds ``budget_tokens`` its old turns are cut to ``low_water`` of it at one go, so that the next
    turns can append and find their prefix again.
    """

    mode: Literal["off", "text", "kv"] = "off"
    budget_tokens: int = Field(default=2048, ge=64)
    low_water: float = Field(default=0.5, gt=0.0, lt=1.0)
    keep_turns: int = Field(default=1, ge=0, description="exchanges before the last message that stay as they are")
    recall_tokens: int = Field(default=96, ge=0, description="left-out sentences that the last message asks for")
    tier: Literal["int4", "drop"] = Field(default="drop", description="where the KV of old turns goes (kv)")


class PromptConfig(Section):
    """What the prompt pipeline does."""

    dedup: DedupConfig = DedupConfig()
    history: HistoryConfig = HistoryConfig()

    @property
    def changes_text(self) -> bool:
        return self.dedup.mode != "off" or self.history.mode == "text"
