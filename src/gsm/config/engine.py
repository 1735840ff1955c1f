"""The engine section: what runs together, what waits, and how much memory it may take. All sizes in tokens."""

from __future__ import annotations

from pydantic import Field, model_validator

from gsm.config.section import Section


class EngineConfig(Section):
    """Limits of the continuous-batching engine.

    A prompt is computed in chunks that end at multiples of ``chunk_tokens``, whatever runs beside it: what a request
    computes does not depend on its company.
    """

    max_running: int = Field(default=32, ge=1, le=4096, description="choices that run at the same time")
    max_batch_tokens: int = Field(default=512, ge=1, description="most tokens of one step, decoding ones included")
    chunk_tokens: int = Field(default=256, ge=1)
    max_waiting: int = Field(default=256, ge=0, description="requests in the queue; more are refused")
    queue_timeout_s: float = Field(default=60.0, gt=0.0)
    kv_memory_mib: float | None = Field(default=None, gt=0.0, description="most bytes of KV pages in use")
    kv_pages: int | None = Field(default=None, ge=1, description="most pages of each layer and head")
    prefix_cache: bool = True
    prefix_disk_mib: float = Field(default=4096.0, gt=0.0, description="most bytes kept in the prefix directory")
    draft_tokens: int = Field(default=0, ge=0, le=15, description="guesses of prompt lookup per step; 0 is off")

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) is below max_running ({self.max_running}): not every "
                "running choice could decode in a step; raise one or lower the other"
            )
        return self
