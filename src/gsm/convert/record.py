"""What a conversion found. Perplexities of all versions are taken on the same evaluation tokens."""

from __future__ import annotations

from pydantic import Field

from gsm.results import Environment
from gsm.results.records import Record


class PerplexityChange(Record):
    """One version of the model against the original, on the same tokens."""

    perplexity: float
    ratio: float = Field(description="perplexity over the original's; 1 is no loss")
    ratio_ci95: tuple[float, float] | None = Field(default=None, description="bootstrap over windows")
    kl: float = Field(description="mean KL(original || this), nats per token")
    top1_agreement: float


class UptrainRecord(Record):
    """What brief further training did."""

    steps: int
    tokens: int
    trained_parameters: int
    cpu_s: float
    text: str
    text_sha256: str
    first_loss: float
    last_loss: float
    recovered: float | None = Field(description="share of the lost log-perplexity that came back, 0 to 1")


class ConvertResult(Record):
    """`gsm convert gqa`."""

    environment: Environment
    output: str
    kv_heads_before: int
    kv_heads_after: int
    kv_bytes_per_token_before: float
    kv_bytes_per_token_after: float
    parameters_before: int
    parameters_after: int
    evaluation_text: str
    evaluation_sha256: str
    evaluation_tokens: int
    perplexity_before: float
    pooled: PerplexityChange
    uptrain: UptrainRecord | None = None
    uptrained: PerplexityChange | None = None
