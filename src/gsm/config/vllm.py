"""The vllm section: what only the vLLM plugin asks. Everything else in the file means there what it means here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gsm.config.section import Section


class VllmConfig(Section):
    """Where the plugin reads everything instead of a selection of pages, and whether kv heads choose for themselves."""

    block_tokens: Literal[16, 32] | None = Field(
        default=None, description="tokens of a block, which is a page here; null: 32 on a CPU (faster), 16 elsewhere"
    )
    dense_layers: tuple[int, ...] = Field(default=(), description="layers that always read every page")
    dense_below_tokens: int = Field(default=0, ge=0, description="requests shorter than this read every page")
    per_head: bool = Field(default=True, description="every kv head chooses its own pages; false: one choice per layer")
    always_select: bool = Field(
        default=False, description="go through the page tables even where every page is chosen (for tests)"
    )
