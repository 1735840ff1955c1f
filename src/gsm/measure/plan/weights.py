"""How large the model itself is: from its files, counted, estimated, or as the user says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gsm.arch import ModelArch, describe
from gsm.models import ModelConfig, count_parameters, read_model_config
from gsm.models.sizes import DTYPE_BYTES, format_bytes


@dataclass(frozen=True)
class PlannedModel:
    """What a plan needs to know of a model. ``active_share``: the part of the weights that one decoded token reads."""

    name: str
    arch: ModelArch
    dtype: str
    num_parameters: int | None
    weight_bytes: int | None
    weights_from: str
    active_share: float = 1.0

    def with_weights(self, weight_bytes: int) -> PlannedModel:
        """The same with the size of the weights that the user gave."""
        fields = {**self.__dict__, "weight_bytes": weight_bytes, "weights_from": "as given"}
        return PlannedModel(**fields)


def plan_model(source: str | Path, dtype: str | None = None) -> PlannedModel:
    """Read the config of ``source`` (see `gsm.models.read_model_config`). ``dtype`` defaults to the config's own."""
    found = read_model_config(source)
    arch = describe(found.config)
    dtype = dtype or _own_dtype(found)
    num_parameters, origin = _count(found, arch)
    if found.quantised and found.num_file_bytes:
        weight_bytes, origin = found.num_file_bytes, "the quantised files"
    else:
        weight_bytes, origin = num_parameters * DTYPE_BYTES[dtype], f"{origin} in {dtype}"
    share = arch.num_active_parameters_estimate / max(1, arch.num_parameters_estimate)
    return PlannedModel(found.name, arch, dtype, num_parameters, weight_bytes, origin, min(1.0, share))


def _own_dtype(found: ModelConfig) -> str:
    for config in (found.config, found.config.get("text_config") or {}):
        name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        if name in DTYPE_BYTES:
            return name
    return "float16"


def _count(found: ModelConfig, arch: ModelArch) -> tuple[int, str]:
    if found.num_parameters:
        return found.num_parameters, f"{_millions(found.num_parameters)} stored parameters"
    counted = count_parameters(found.config)
    if counted:
        return counted, f"{_millions(counted)} counted parameters"
    estimate = arch.num_parameters_estimate
    return estimate, f"about {_millions(estimate)} parameters (estimated from the config)"


def _millions(count: int) -> str:
    return format_bytes(count).removesuffix("B").replace("G", "B").rstrip()
