"""Calibration: one streaming pass of real text that records where activations have heavy tails.

Observed per decoder block: the outputs of both norms, the input and output of the attention's output projection, the
input of the MLP's output projection, and the residual stream that enters the block. The first tokens of every sample
(attention sinks) are kept apart, because they carry most of the largest values and behave unlike all other tokens.
Memory is O(channels): rows are folded into moments and forgotten. The language-model head is never run, unless
gradients are asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gsm.errors import MeasurementError
from gsm.smoothing.int8_ops import hadamard
from gsm.smoothing.moments import Moments
from gsm.smoothing.sites import Sites, find_sites

Progress = Callable[[int, int], None]
_BATCH_TOKENS = 1024  # rows per forward pass; bounds the memory of activations
MAX_GRADIENT_SAMPLES = 64


@dataclass
class SiteMoments:
    """Everything recorded at one place of the model. ``name`` is the module, ``place`` its "input" or "output"."""

    name: str
    place: str
    kind: str
    block: int
    body: Moments
    sink: Moments
    gradient: Moments | None = None
    sensitivity: float | None = None
    _weighted_error: float = field(default=0.0, repr=False)

    @property
    def key(self) -> str:
        return f"{self.name}:{self.place}"

    def total(self) -> Moments:
        whole = Moments(self.body.num_channels)
        whole.merge(self.body)
        whole.merge(self.sink)
        return whole

    def add(self, x: Tensor, num_sink_tokens: int) -> None:
        """``x`` [batch, tokens, channels]; the first tokens of each sample are sinks."""
        self.sink.add(x[:, :num_sink_tokens].flatten(0, 1))
        self.body.add(x[:, num_sink_tokens:].flatten(0, 1))

    def add_gradient(self, x: Tensor, gradient: Tensor) -> None:
        """Take in the gradient of the loss at ``x``, and weigh the error of int8 rounding with its square."""
        rows, grads = x.flatten(0, -2), gradient.flatten(0, -2)
        if self.gradient is None:
            self.gradient = Moments(rows.shape[1])
        self.gradient.add(grads)
        self._weighted_error += float((grads.double().pow(2) * int8_error(rows).double().pow(2)).sum())
        self.sensitivity = self._weighted_error / self.gradient.count


def int8_error(rows: Tensor) -> Tensor:
    """What symmetric int8 rounding with one scale per row takes away, same shape as ``rows``."""
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (rows / scale).round() * scale - rows


@torch.no_grad()
def observe(
    model: nn.Module, samples: Tensor, *, num_sink_tokens: int = 1, progress: Progress | None = None
) -> dict[str, SiteMoments]:
    """Run ``samples`` [num_samples, tokens] int64 through the decoder and return the moments of every site by key.

    The model is unchanged afterwards. Raises MeasurementError when an activation is not finite.
    """
    _check(samples, num_sink_tokens)
    records: dict[str, SiteMoments] = {}

    def take(record_of: Callable[[int], SiteMoments], x: Tensor) -> None:
        # mixtures flatten batch and tokens; the reshape finds each sample's first tokens again
        record_of(x.shape[-1]).add(x.reshape(-1, samples.shape[1], x.shape[-1]), num_sink_tokens)

    batch = max(1, _BATCH_TOKENS // samples.shape[1])
    with _watching(model, find_sites(model), records, take):
        for start in range(0, len(samples), batch):
            _decoder(model)(input_ids=samples[start : start + batch].to(_device(model)), use_cache=False)
            if progress is not None:
                progress(min(start + batch, len(samples)), len(samples))
    _refuse_non_finite(records)
    return records


def observe_gradients(
    model: nn.Module, samples: Tensor, records: dict[str, SiteMoments], *, progress: Progress | None = None
) -> None:
    """Add gradients of the next-token loss, and a sensitivity per site, to ``records``; one backward pass per sample.

    At most `MAX_GRADIENT_SAMPLES` samples are used. Weights get no gradients: only activations do.
    """
    samples = samples[:MAX_GRADIENT_SAMPLES]

    def take(record_of: Callable[[int], SiteMoments], x: Tensor) -> None:
        record = record_of(x.shape[-1])
        if x.requires_grad:
            held = x.detach()
            x.register_hook(lambda gradient: record.add_gradient(held, gradient))

    with _frozen(model), torch.enable_grad(), _watching(model, find_sites(model), records, take):
        for index, sample in enumerate(samples):
            ids = sample[None].to(_device(model))
            embedded = _decoder(model).get_input_embeddings()(ids).detach().requires_grad_(True)
            logits = model(inputs_embeds=embedded, use_cache=False).logits
            nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()
            if progress is not None:
                progress(index + 1, len(samples))


@torch.no_grad()
def capture_rows(model: nn.Module, samples: Tensor, keys: Sequence[str], num_rows: int = 128) -> dict[str, Tensor]:
    """Some activation rows [num_rows, channels] float32 for each site key ("module:place"), evenly spread over samples.

    One forward pass of at most `_BATCH_TOKENS` tokens; memory is ``num_rows`` rows per site.
    """
    wanted, rows = set(keys), {}

    def take(record_of: Callable[[int], SiteMoments], x: Tensor) -> None:
        key = record_of(x.shape[-1]).key
        if key in wanted and key not in rows:
            flat = x.detach().flatten(0, -2)
            picks = torch.linspace(1, len(flat) - 1, min(num_rows, len(flat) - 1)).long()
            rows[key] = flat[picks.to(flat.device)].float().cpu()

    batch = samples[: max(1, _BATCH_TOKENS // samples.shape[1])]
    with _watching(model, find_sites(model), {}, take):
        _decoder(model)(input_ids=batch.to(_device(model)), use_cache=False)
    return rows


@contextlib.contextmanager
def _watching(model: nn.Module, sites: Sites, records: dict[str, SiteMoments], take: Any) -> Iterator[None]:
    """Call ``take(record_of, x)`` with every observed activation; hooks are always removed."""

    def recorder(name: str, place: str, kind: str, block: int) -> Callable[[int], SiteMoments]:
        def record_of(width: int) -> SiteMoments:
            key = f"{name}:{place}"
            if key not in records:
                records[key] = SiteMoments(name, place, kind, block, Moments(width), Moments(width))
            return records[key]

        return record_of

    handles: list[Any] = []
    try:
        for name, place, kind, block in observed_places(sites, model):
            record_of = recorder(name, place, kind, block)
            module = model.get_submodule(name)
            if place == "input":
                handles.append(module.register_forward_pre_hook(_input_hook(record_of, take), with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(_output_hook(record_of, take)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def observed_places(sites: Sites, model: nn.Module) -> list[tuple[str, str, str, int]]:
    """(module, "input" or "output", kind, block index) of everything that calibration records."""
    places = []
    for block in sites:
        layout = block.layout
        places.append((block.name, "input", "residual", block.index))
        places.append((block.path(layout.attn_norm), "output", "attn_norm", block.index))
        places.append((block.path(layout.attn_out), "input", "attn_out_input", block.index))
        places.append((block.path(layout.attn_out), "output", "attn_out_output", block.index))
        places.append((block.path(layout.mlp_norm), "output", "mlp_norm", block.index))
        for name in layout.mlp_out:
            # stacked experts are bare parameters: what happens between their two products cannot be seen
            if isinstance(block.part(name), nn.Module):
                places.append((block.path(name), "input", "mlp_out_input", block.index))
    return places


def _input_hook(record_of: Any, take: Any) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        block = getattr(module, "rotation_block", 1)  # what is rounded is the rotated input
        take(record_of, hadamard(x, block) if block > 1 else x)

    return hook


def _output_hook(record_of: Any, take: Any) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        take(record_of, output[0] if isinstance(output, tuple) else output)

    return hook


def _decoder(model: nn.Module) -> Any:
    get_decoder = getattr(model, "get_decoder", None)
    return get_decoder() if callable(get_decoder) else model


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient inside; each gets its own flag back."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _check(samples: Tensor, num_sink_tokens: int) -> None:
    if samples.dim() != 2 or samples.shape[0] == 0 or samples.shape[1] <= num_sink_tokens:
        raise MeasurementError(
            f"calibration samples have shape {tuple(samples.shape)}; give [samples, tokens] with at least one sample "
            f"and more than {num_sink_tokens} tokens each"
        )


def _refuse_non_finite(records: dict[str, SiteMoments]) -> None:
    for record in records.values():
        moments = record.total()
        if not bool(torch.isfinite(moments.absmax).all() and torch.isfinite(moments.sums.m4).all()):
            raise MeasurementError(
                f"activations at {record.key} are not finite; the model overflows in this precision, load it in float32"
            )
