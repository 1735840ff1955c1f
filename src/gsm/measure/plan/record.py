"""What `gsm plan` answers. Bytes are bytes; a figure that cannot be known is None."""

from __future__ import annotations

from typing import Any

from gsm.results import Record


class LayerKindRow(Record):
    """The cache of all layers of one kind, as plain transformers keeps it."""

    kind: str
    num_layers: int
    formula: str
    elements_per_token: float
    bytes_per_token: float
    bytes_at_context: float


class Parts(Record):
    """Where the bytes of a sequence's cache go."""

    codes: float = 0
    hot_copies: float = 0
    summaries: float = 0
    tables: float = 0
    statistics: float = 0
    states: float = 0

    @property
    def total(self) -> float:
        return self.codes + self.hot_copies + self.summaries + self.tables + self.statistics + self.states


class Capacity(Record):
    """How much one way of keeping the cache can hold in the budget."""

    name: str
    config: dict[str, Any] | None
    bytes_per_token: float
    bytes_at_context: float
    parts: Parts
    max_tokens: int | None = None
    max_sequences: int | None = None


class StepBytes(Record):
    """What a decode step of one sequence must read, and the largest gain that reading less KV can bring."""

    context_tokens: int
    weight_bytes: int
    kv_bytes: float
    kv_share: float
    attended_tokens: int
    sparse_kv_bytes: float
    max_gain: float
    max_gain_batched: float | None = None


class PlanResult(Record):
    """`gsm plan`: sizes, capacities, the bound of the gain, and a recommendation."""

    model: str
    model_type: str
    dtype: str
    context_tokens: int
    max_position_embeddings: int
    support: str
    support_reason: str
    helps_instead: tuple[str, ...]
    num_parameters: int | None
    weight_bytes: int | None
    weights_from: str
    activation_bytes: int | None
    memory_bytes: int
    memory_from: str
    reserve_bytes: int
    reserve_from: str
    kv_budget_bytes: int
    kv_bytes_per_token: float
    kinds: tuple[LayerKindRow, ...]
    capacities: tuple[Capacity, ...]
    steps: tuple[StepBytes, ...]
    recommended: dict[str, Any] | None
    verdict: str
    notes: tuple[str, ...]
