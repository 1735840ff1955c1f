"""The fixed prompt of a benchmark."""

from __future__ import annotations

import torch

from gsm.errors import InputError
from gsm.models import LoadedModel
from gsm.quality import TextThirds, encode


def check_window(loaded: LoadedModel, prompt_tokens: int, new_tokens: int) -> None:
    """Raise InputError when prompt and answer leave the positions that the model was trained for."""
    window = loaded.arch.max_position_embeddings
    if 0 < window < prompt_tokens + new_tokens:
        raise InputError(
            f"a prompt of {prompt_tokens} tokens with {new_tokens} new ones does not fit {loaded.name}, which was "
            f"trained for {window} positions; shorten the prompt to at most {max(0, window - new_tokens)} tokens"
        )


def make_prompt(
    loaded: LoadedModel, thirds: TextThirds, prompt_tokens: int, new_tokens: int, batch_size: int
) -> torch.Tensor:
    """Ids [batch, prompt_tokens] on the model's device: different rows of real text, the same in every process.

    A text shorter than the prompt is repeated; that is good enough for speed and never used for quality.
    """
    check_window(loaded, prompt_tokens, new_tokens)
    ids = encode(loaded.tokenizer, thirds.evaluation)
    stride = max(1, len(ids) // batch_size)
    columns = torch.arange(prompt_tokens)
    rows = [ids[(row * stride + columns) % len(ids)] for row in range(batch_size)]
    return torch.stack(rows).to(loaded.model.device)
