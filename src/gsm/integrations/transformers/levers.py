"""Both levers at once: what `gsm.attach` does with a whole config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from gsm.config import ConfigLike, load_config
from gsm.integrations.transformers.attach import Attached
from gsm.integrations.transformers.attach import attach as attach_cache
from gsm.smoothing import apply, is_applied


@contextmanager
def attach(
    model: PreTrainedModel, config: ConfigLike = None, *, samples: Tensor | None = None, tokenizer: Any = None
) -> Iterator[Attached]:
    """Run `model` as `config` says inside the `with` block; the model is restored whatever happens.

    `model.generate(...)` works unchanged: the caches it makes itself are replaced by `gsm.Cache`. A smoothing section
    that changes anything is applied first, unless the model is inside a `gsm.smoothing.apply` already. Methods that
    learn from text read `samples`, token ids int64 `[n, tokens]`; grading thoughts needs the `tokenizer`. Raises
    ConfigError, UnsupportedModel or AttachError with the model as it was.
    """
    settings = load_config(config)
    with ExitStack() as kept:
        if settings.smoothing.active and not is_applied(model):
            kept.enter_context(apply(model, settings.smoothing, samples=samples))
        yield kept.enter_context(attach_cache(model, settings, tokenizer=tokenizer))
