"""A tiny model as engines take it, and prompts for it."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from gsm.arch import describe
from gsm.models import LoadedModel


def load_tiny(model: PreTrainedModel) -> LoadedModel:
    """A tiny model with a tokenizer that writes token 17 as " w17"."""
    words = {f" w{i}": i for i in range(model.config.vocab_size)}
    words_of = Tokenizer(models.WordLevel(words, unk_token=" w0"))
    words_of.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_of)
    return LoadedModel(model, tokenizer, "tiny", "tiny", describe(model.config))


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
