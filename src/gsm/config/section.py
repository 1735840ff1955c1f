"""The base of every section of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section of the configuration; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)
