"""Count a model's weights exactly without allocating them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def count_parameters(config: Mapping[str, Any]) -> int | None:
    """Parameters of the causal model that ``config`` describes, or None where transformers cannot build it.

    The model is built on torch's meta device: no memory, about a second for the largest.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from gsm.models.quiet import quiet_transformers

    model_type = config.get("model_type")
    if not model_type or model_type not in CONFIG_MAPPING:
        return None
    settings = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        with quiet_transformers(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type].from_dict(settings))
    except Exception:  # each family's constructor fails in its own way; the caller has an estimate
        return None
    return sum(parameter.numel() for parameter in model.parameters())
