"""How linear layers are multiplied."""

from __future__ import annotations

from typing import Literal

from gsm.config.section import Section

LinearBackend = Literal["auto", "torch"]


class LinearConfig(Section):
    """``auto``: layers on a CPU multiply by the code that reads weights fastest (`gsm.linear`); ``torch``: its own."""

    backend: LinearBackend = "auto"
