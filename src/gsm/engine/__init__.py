"""Continuous batching on an unmodified transformers model."""

from gsm.engine.engine import Engine
from gsm.engine.epochs import Epoch
from gsm.engine.params import SamplingParams
from gsm.engine.request import Request, Sequence, TokenEvent, TokenLogprobs
from gsm.engine.shadow import Score

__all__ = ["Engine", "Epoch", "Request", "SamplingParams", "Score", "Sequence", "TokenEvent", "TokenLogprobs"]
