"""Size of the fixed state that a linear-attention, state-space or convolution layer keeps per sequence."""

from __future__ import annotations

from typing import Any


def state_elements(layer: Any) -> int:
    """Elements of convolution and recurrent state; 0 where the family's state is not known to us.

    The shapes are those that transformers caches: a convolution state of kernel-size columns per channel, and a
    recurrent state per head or channel.
    """
    for fields, size in _STATES:
        if all(getattr(layer, name, None) is not None for name in fields):
            return int(size(layer))
    return 0


def _gated_delta(c: Any) -> int:
    """Qwen3-Next and relatives: one k x v matrix per value head."""
    k, v = c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads * c.linear_value_head_dim
    return (2 * k + v) * c.linear_conv_kernel_dim + v * c.linear_key_head_dim


def _jamba(c: Any) -> int:
    inner = c.mamba_expand * c.hidden_size
    return inner * (c.mamba_d_conv + c.mamba_d_state)


def _mamba2_style(c: Any) -> int:
    """Bamba, Falcon-H1, Granite 4: groups share the state's projections."""
    inner = getattr(c, "mamba_d_ssm", None) or c.mamba_expand * c.hidden_size
    conv_dim = inner + 2 * c.mamba_n_groups * c.mamba_d_state
    return conv_dim * c.mamba_d_conv + inner * c.mamba_d_state


def _mamba(c: Any) -> int:
    inner = getattr(c, "intermediate_size", None) or c.expand * c.hidden_size
    return inner * (c.conv_kernel + c.state_size)


def _mamba2(c: Any) -> int:
    inner = c.num_heads * c.head_dim
    return (inner + 2 * c.n_groups * c.state_size) * c.conv_kernel + inner * c.state_size


def _nemotron(c: Any) -> int:
    inner = c.mamba_num_heads * c.mamba_head_dim
    return (inner + 2 * c.n_groups * c.ssm_state_size) * c.conv_kernel + inner * c.ssm_state_size


def _short_convolution(c: Any) -> int:
    return int(c.hidden_size * c.conv_L_cache)


# the first row whose fields the config has decides
_STATES: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("linear_num_key_heads", "linear_conv_kernel_dim"), _gated_delta),
    (("mamba_d_state", "mamba_n_groups", "mamba_n_heads"), _mamba2_style),
    (("mamba_d_state", "mamba_expand"), _jamba),
    (("state_size", "conv_kernel", "n_groups"), _mamba2),
    (("state_size", "conv_kernel"), _mamba),
    (("mamba_num_heads", "ssm_state_size"), _nemotron),
    (("conv_L_cache",), _short_convolution),
)
