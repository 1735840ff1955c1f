"""Continuous batching on an unmodified transformers model."""

from gsm.engine.engine import Engine
from gsm.engine.params import SamplingParams
from gsm.engine.request import Request, TokenEvent, TokenLogprobs

__all__ = ["Engine", "Request", "SamplingParams", "TokenEvent", "TokenLogprobs"]
