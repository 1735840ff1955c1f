"""The prompt side: fewer tokens reach the model, and everybody can ask what was left out."""

from gsm.prompt.chunking import chunk, cut
from gsm.prompt.pipeline import Prompt, PromptPipeline, Trace
from gsm.prompt.reasoning import ThinkTracker
from gsm.prompt.spans import Message, Place, SpanMap

__all__ = ["Message", "Place", "Prompt", "PromptPipeline", "SpanMap", "ThinkTracker", "Trace", "chunk", "cut"]
