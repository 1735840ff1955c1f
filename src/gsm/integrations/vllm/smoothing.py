"""Window smoothing at the inputs of o_proj and down_proj, by vLLM's out-of-tree layer.

    y_t = (1 - a) x_t + a mean(x_{t-W+1} .. x_t)

The window's past lies beside the KV: `[blocks, W - 1, channels]` per smoothed module holds the last inputs of every
physical block, so that chunked prefill, preemption, and reused prefixes find what they need where they find their
block. Smoothing acts on single channels: tensor parallel ranks need nothing of each other. An opaque operation keeps
it out of torch.compile's sight, and lets strength and window change while running.

A layer does not know how long a request will become. So `short_request` goes by position here: the first `max_tokens`
tokens of every request are exempt (or have their own parameters), and `window_size: auto` is the largest window.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.utils.torch_utils import direct_register_custom_op

from gsm.config.smoothing import SmoothingConfig
from gsm.errors import ConfigError
from gsm.integrations.vllm.live import Live, foreign_connector, live_of
from gsm.integrations.vllm.step import Step
from gsm.integrations.vllm.window import WindowIndex, smooth

SITES = (".o_proj", ".down_proj")
_OPERATION = "vllm::gsm_smooth_window"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def is_target(config: SmoothingConfig, prefix: str) -> bool:
    """Whether the module `prefix` is smoothed. Raises ConfigError where the choice needs measured activations."""
    if not config.is_windowed:
        return False
    if isinstance(config.target_layers, str):
        if config.target_layers != "all":
            raise ConfigError(
                f"target_layers: {config.target_layers} is chosen from measured activations, which vLLM does not take; "
                "name the modules (patterns such as model.layers.1*.o_proj work), or set all"
            )
        return prefix.endswith(SITES)
    return any(fnmatch.fnmatch(prefix, pattern) for pattern in config.target_layers)


class GsmRowParallelLinear(RowParallelLinear):
    """`RowParallelLinear` whose input is smoothed first where the config names it."""

    def __init__(self, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(*args, prefix=prefix, **kwargs)
        self.gsm: Live | None = None
        self.gsm_state: Tensor | None = None
        self.gsm_name = prefix + ".gsm"
        self.gsm_drafts = 0
        vllm_config = get_current_vllm_config()
        live = live_of(vllm_config)
        if live is not None and is_target(live.config.smoothing, prefix):
            connector = foreign_connector(vllm_config)
            if connector is not None:
                raise ConfigError(
                    f"smoothing keeps inputs beside KV blocks, which {connector} does not move; drop either"
                )
            self.gsm = live
            speculative = vllm_config.speculative_config
            self.gsm_drafts = speculative.num_speculative_tokens if speculative is not None else 0
            compilation = vllm_config.compilation_config
            compilation.static_forward_context[self.gsm_name] = self
            if compilation.splitting_ops and _OPERATION not in compilation.splitting_ops:
                compilation.splitting_ops.append(_OPERATION)  # as attention: it reads the step, which no graph may hold

    def forward(self, input_: Tensor) -> Any:
        if self.gsm is not None:
            input_ = torch.ops.vllm.gsm_smooth_window(input_, self.gsm_name)
        return super().forward(input_)


def smooth_window(x: Tensor, layer_name: str) -> Tensor:
    """`x [tokens, channels]` of one forward pass; returns a new tensor."""
    context = get_forward_context()
    step = _step(context.attn_metadata)
    if step is None:  # profiling
        return x.clone()
    layer = context.no_compile_layers[layer_name]
    config = layer.gsm.config.smoothing
    if layer.gsm_state is None:
        ring = config.window_for(1 << 20) - 1 + layer.gsm_drafts  # rejected drafts must not cover what is still needed
        num_blocks = _num_blocks(context)
        layer.gsm_state = torch.zeros(num_blocks, ring, x.shape[-1], dtype=_DTYPES[config.precision], device=x.device)
    ring = layer.gsm_state.shape[1]
    index = step.derived("window", lambda: WindowIndex.of_step(step, ring, x.device))
    return smooth(x, layer.gsm_state, index, config)


def _smooth_window_fake(x: Tensor, layer_name: str) -> Tensor:
    return torch.empty_like(x)


def _step(metadata: Any) -> Step | None:
    """The step of the layers that see their whole past: only their tables keep every block."""
    if isinstance(metadata, list):
        metadata = metadata[0]
    if not isinstance(metadata, dict):
        return None
    steps = (getattr(one, "gsm", None) for one in metadata.values())
    return next((step for step in steps if step is not None), None)


def _num_blocks(context: Any) -> int:
    caches = (getattr(layer, "kv_cache", None) for layer in context.no_compile_layers.values())
    return max(cache.shape[0] for cache in caches if isinstance(cache, Tensor) and cache.dim() > 1)


@dataclass
class _Registered:
    done: bool = False


_registered = _Registered()


def register_layer() -> None:
    """Put the layer in the place of `RowParallelLinear`. May be called again."""
    if _registered.done:
        return
    direct_register_custom_op("gsm_smooth_window", smooth_window, fake_impl=_smooth_window_fake)
    RowParallelLinear.register_oot(GsmRowParallelLinear)
    _registered.done = True
