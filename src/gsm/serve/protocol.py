"""The bodies of OpenAI's API that we understand, checked. An unknown field is an error, never silently dropped.

Fields of vLLM that clients already send (`top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, `cache_salt`, ...)
have the same names; `gsm` holds settings of our own for one request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gsm.config import SparseConfig
from gsm.config.prompt import PromptConfig
from gsm.engine import SamplingParams

_TEXT_ONLY = "only text parts are supported; leave images, audio and files out"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers: accepted, not sent


class GsmOptions(_Body):
    """Our own settings of one request: how its decode steps choose what to read, and what is done to its messages
    before they become tokens (chat only; instead of the server's)."""

    sparse: SparseConfig | None = None
    prompt: PromptConfig | None = None


class ResponseFormat(_Body):
    type: Literal["text"]


class _Generation(_Body):
    """What both endpoints share."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    n: int | None = Field(default=None, ge=1, le=16)
    stop: str | list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, max_length=16)
    stop_token_ids: list[int] | None = Field(default=None, max_length=64)
    seed: int | None = Field(default=None, ge=-(2**63) + 1, le=2**63 - 1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0.01, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=1024)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=512)
    cache_salt: str | None = Field(default=None, max_length=512)
    gsm: GsmOptions | None = None
    # accepted for the clients that always send them; they change nothing here
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_every_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self, max_tokens: int, logprobs: int | None, vocab_size: int) -> SamplingParams:
        """OpenAI's defaults (temperature 1) where the request says nothing. Raises InputError."""
        bias = {_token_id(key, vocab_size): value for key, value in (self.logit_bias or {}).items()}
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            n=self.n or 1,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=bias,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=logprobs,
        )

    @model_validator(mode="after")
    def _no_empty_stop(self) -> _Generation:
        if self.stop == "":
            raise ValueError("stop is an empty text, which would stop everything at once; leave it out")
        return self


def _token_id(key: str, vocab_size: int) -> int:
    from gsm.errors import InputError

    if not (key.isascii() and key.isdigit() and int(key) < vocab_size):
        raise InputError(f"logit_bias names token {key!r}; use ids from 0 to {vocab_size - 1}")
    return int(key)


class Message(BaseModel):
    """One turn. Other fields (`name`, `tool_calls`, `reasoning_content`, ...) reach the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: str | list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            message["content"] = "".join(_text_of(part) for part in self.content)
        message.setdefault("content", "")
        return message


def _text_of(part: dict[str, Any]) -> str:
    from gsm.errors import InputError

    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise InputError(f"a message has a part of type {part.get('type')!r}; {_TEXT_ONLY}")
    return text


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=32)
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of other than n is not supported; ask for n choices and pick one")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]
