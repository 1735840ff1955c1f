"""One run of one config, watched closely: outputs, positions, memory, time, and where a value stopped being finite."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import gsm.integrations.transformers as hf
from gsm import smoothing
from gsm.config import GsmConfig
from gsm.errors import KVError
from gsm.kv.positions import PositionMap
from gsm.kv.report import KVStats
from gsm.stats import summary


@dataclass(frozen=True)
class Subject:
    """What every run of a diagnosis shares. ``prompt`` and ``forced`` are token ids [n], int64."""

    model: Any
    prompt: Tensor
    forced: Tensor
    samples: Tensor | None = None  # calibration text [n, tokens], for smoothing
    calibration: smoothing.Calibration | None = None
    num_generated: int = 32
    chunk_tokens: int = 256


@dataclass
class Observation:
    """What was seen. ``logits`` [forced, vocab] float32 on the CPU, after each forced token."""

    logits: Tensor
    step_ms: float
    generated: list[int]
    wrong_positions: list[tuple[int, int]]  # (position that the model saw, position that is right), the first few
    first_nonfinite: str | None
    kv_bytes: int
    stats: KVStats | None = None
    positions: PositionMap | None = None
    page_mass: Tensor | None = None  # [layers, heads, pages]; NaN where nothing was observed
    integrity: str | None = None
    own_cost_ms: float = 0.0  # of window smoothing, per step
    smoothed: tuple[str, ...] = ()

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.logits).all())


@dataclass
class _Watch:
    """Forward hooks that look and do not touch."""

    wrong: list[tuple[int, int]] = field(default_factory=list)
    first_nonfinite: str | None = None
    num_fed: int = 0


@torch.inference_mode()
def observe(subject: Subject, config: GsmConfig | None) -> Observation:
    """Run ``config`` (None: plain transformers) over the subject's tokens; the model is restored afterwards."""
    model = subject.model
    with ExitStack() as stack:
        applied = None
        if config is not None and config.smoothing.active:
            applied = stack.enter_context(
                smoothing.apply(model, config.smoothing, samples=subject.samples, calibration=subject.calibration)
            )
        watch = stack.enter_context(_watching(model))
        if config is not None:
            stack.enter_context(hf.attach(model, config))
        cache = _new_cache(model, config)
        try:
            logits, times = _feed(subject, cache, watch)
            seen = _describe(cache, config, logits, times, watch)
            seen.generated = _generate(subject, cache, logits[-1])
            if applied is not None and applied.window is not None and applied.window.cost.calls:
                seen.own_cost_ms = _decode_cost_ms(subject, cache, applied.window)
                seen.smoothed = tuple(applied.smoothed)
            return seen
        finally:
            if config is not None:
                cache.free()


@torch.inference_mode()
def beside_another(subject: Subject, config: GsmConfig, ids: Tensor, longer: Tensor) -> tuple[Tensor, Tensor]:
    """Last logits [vocab] of the prompt ``ids`` alone, and left-padded in a batch beside ``longer``."""
    model = subject.model
    pad = len(longer) - len(ids)
    padded = torch.stack((torch.cat((longer[:1].expand(pad), ids)), longer))
    mask = torch.ones_like(padded)
    mask[0, :pad] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with ExitStack() as stack:
        if config.smoothing.active:
            section = config.smoothing
            stack.enter_context(
                smoothing.apply(model, section, samples=subject.samples, calibration=subject.calibration)
            )
        stack.enter_context(hf.attach(model, config))
        alone = model(input_ids=ids[None].to(model.device), use_cache=True).logits[0, -1]
        both = model(
            input_ids=padded.to(model.device),
            attention_mask=mask.to(model.device),
            position_ids=positions.to(model.device),
            use_cache=True,
        ).logits[0, -1]
    return alone.float().cpu(), both.float().cpu()


def _new_cache(model: Any, config: GsmConfig | None) -> Any:
    if config is not None:
        return hf.Cache(model, config)
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _feed(subject: Subject, cache: Any, watch: _Watch) -> tuple[Tensor, list[float]]:
    device = subject.model.device
    hf.prefill(subject.model, subject.prompt[None].to(device), cache, subject.chunk_tokens)
    rows, times = [], []
    for token in subject.forced.to(device):
        began = time.perf_counter()
        row = _step(subject.model, cache, token)
        times.append(1e3 * (time.perf_counter() - began))
        rows.append(row.float().cpu())
    return torch.stack(rows), times


def _step(model: Any, cache: Any, token: Tensor) -> Tensor:
    arguments = {hf.cache_kwarg(model): cache, "use_cache": True}
    logits: Tensor = model(input_ids=token.view(1, 1), **arguments).logits
    return logits[0, -1]


def _generate(subject: Subject, cache: Any, logits: Tensor) -> list[int]:
    """Greedy tokens after the forced ones: what a user would read."""
    answer: list[int] = []
    for _ in range(subject.num_generated):
        if not bool(torch.isfinite(logits).all()):
            break
        answer.append(int(logits.argmax()))
        logits = _step(subject.model, cache, torch.tensor(answer[-1], device=subject.model.device)).float().cpu()
    return answer


def _decode_cost_ms(subject: Subject, cache: Any, window: Any) -> float:
    """What window smoothing itself takes per decode step, over a few more steps."""
    steps, before = 4, window.cost.seconds
    for token in subject.forced[:steps].to(subject.model.device):
        _step(subject.model, cache, token)
    return float(1e3 * (window.cost.seconds - before) / steps)


def _describe(
    cache: Any, config: GsmConfig | None, logits: Tensor, times: Sequence[float], watch: _Watch
) -> Observation:
    seen = Observation(
        logits=logits,
        step_ms=float(summary(times)["median"] or 0.0),
        generated=[],
        wrong_positions=watch.wrong[:4],
        first_nonfinite=watch.first_nonfinite,
        kv_bytes=0,
    )
    if config is None:
        tensors = [t for layer in cache.layers for t in vars(layer).values() if torch.is_tensor(t)]
        seen.kv_bytes = sum(t.nbytes for t in tensors)
        return seen
    seen.stats = cache.stats()
    seen.kv_bytes = seen.stats.kv_bytes
    seen.positions = cache.manager.explain(cache.slots[0])
    seen.page_mass = _page_mass(cache.manager, cache.slots[0], seen.positions)
    try:
        cache.manager.check_integrity()
    except KVError as error:
        seen.integrity = str(error)
    return seen


def _page_mass(manager: Any, slot: int, positions: PositionMap) -> Tensor | None:
    """Attention mass of every page that is still held, in the shape of the position map."""
    if manager.statistics is None:
        return None
    mass = torch.full(positions.tier.shape, torch.nan)
    pages = positions.tier.shape[-1]
    for group in manager.groups:
        entries = group.table[slot, : len(group.rows), :, :pages].long()
        values = manager.statistics.mean(group.pages.fields, entries).cpu()
        rows = [positions.layers.index(layer) for layer in group.rows]
        mass[rows, : entries.shape[1]] = values[list(group.rows.values())]
    return mass


@contextmanager
def _watching(model: Any) -> Iterator[_Watch]:
    """Look at the positions that the first decoder layer is told, and for the first value that is not finite."""
    watch = _Watch()
    handles: list[Any] = [model.register_forward_pre_hook(_count(watch), with_kwargs=True)]
    layers = _decoder_layers(model)
    if layers:
        handles.append(layers[0].register_forward_pre_hook(_see_positions(watch), with_kwargs=True))
    for name, module in model.named_modules():
        if name and not list(module.children()):
            handles.append(module.register_forward_hook(_see_values(watch, name)))
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The longest module list: the blocks of a decoder."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _count(watch: _Watch) -> Any:
    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        watch.num_fed += 0 if ids is None else int(ids.shape[1])

    return before


def _see_positions(watch: _Watch) -> Any:
    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        if positions is None:
            return
        row = positions.reshape(-1, positions.shape[-1])[0].tolist()
        right = range(watch.num_fed - len(row), watch.num_fed)
        watch.wrong += [(seen, want) for seen, want in zip(row, right, strict=True) if seen != want][:1]

    return before


def _see_values(watch: _Watch, name: str) -> Any:
    def after(module: nn.Module, args: Any, output: Any) -> None:
        if watch.first_nonfinite is not None:
            return
        tensor = output[0] if isinstance(output, tuple) and output else output
        if torch.is_tensor(tensor) and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            watch.first_nonfinite = name

    return after
