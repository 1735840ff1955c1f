"""`window`: the source document's causal sliding window along the sequence, at the inputs of output projections.

    y_t = (1 - a) x_t + a mean(x_{t-W+1} .. x_t)

The window belongs to the request: its last inputs are kept in a ring indexed by logical position, so that prefill in
any chunks, decode, and taking back the last few tokens all give the same result. Requests with different windows and
strengths, and requests without smoothing, can share a batch. There is no asynchronous variant: the smoothed tensor is
the very next product's input, so there is nothing to hide its computation behind.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gsm.config.smoothing import SmoothingConfig
from gsm.errors import AttachError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SPARE_TOKENS = 16  # how many of a request's last tokens can be taken back (rejected drafts) without losing the window


@dataclass(frozen=True)
class Parameters:
    """Smoothing of one request, fixed when it is admitted. Strength 0 means none."""

    window: int
    strength: float


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one request inside a step. ``start`` counts tokens in the flattened row(s)."""

    request: Hashable
    start: int
    length: int
    position: int
    parameters: Parameters


@dataclass(frozen=True)
class StepContext:
    """What a step consists of; a hook sees only a tensor of tokens, not whose they are."""

    spans: tuple[Span, ...]


def parameters_for(config: SmoothingConfig, num_tokens: int) -> Parameters:
    """Window and strength of a request expected to reach ``num_tokens`` (prompt and answer), by the config's rules."""
    short = config.short_request
    if num_tokens <= short.max_tokens:
        return Parameters(short.window_size, short.smooth_strength if short.action == "own" else 0.0)
    return Parameters(config.window_for(num_tokens), config.smooth_strength)


class WindowState:
    """The rings of all requests, one tensor [slots, ring, channels] per module; slots are reused."""

    def __init__(self, ring_tokens: int) -> None:
        self.ring_tokens = ring_tokens
        self._slots: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._rings: dict[str, Tensor] = {}

    @property
    def num_requests(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self._rings.values())

    def slot(self, request: Hashable) -> int:
        """The slot of ``request``, given to it on first use."""
        if request not in self._slots:
            self._slots[request] = self._free.pop() if self._free else len(self._slots)
        return self._slots[request]

    def knows(self, request: Hashable) -> bool:
        """Whether ``request`` has a window here."""
        return request in self._slots

    def release(self, request: Hashable) -> None:
        """The request has left; its slot is free for another. Unknown requests are ignored."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        self._slots.clear()
        self._free.clear()
        self._rings.clear()

    def copy(self, source: Hashable, target: Hashable) -> None:
        """``target`` becomes a request that continues from where ``source`` is (a fork of its cache)."""
        if source not in self._slots:
            return
        slots = self.slot(source), self.slot(target)
        for module, ring in self._rings.items():
            grown = self.ring(module, ring.shape[2], ring)
            grown[slots[1]] = grown[slots[0]]

    def reorder(self, requests: Sequence[Hashable], sources: Sequence[int]) -> None:
        """Request i takes over the window of request ``sources[i]`` (beam search)."""
        slots = torch.tensor([self.slot(request) for request in requests])
        for module, ring in self._rings.items():
            grown = self.ring(module, ring.shape[2], ring)
            grown[slots] = grown[slots[torch.tensor(list(sources))]]

    def ring(self, module: str, channels: int, like: Tensor) -> Tensor:
        """The ring tensor of ``module``, grown to hold every slot in use."""
        ring = self._rings.get(module)
        needed = len(self._slots) + len(self._free)
        if ring is None or ring.shape[0] < needed:
            grown = like.new_zeros(
                max(needed, 2 * (ring.shape[0] if ring is not None else 0)), self.ring_tokens, channels
            )
            if ring is not None:
                grown[: ring.shape[0]] = ring
            self._rings[module] = ring = grown
        return ring


@dataclass
class OwnCost:
    """Time spent in smoothing itself; to be compared with the product it precedes."""

    calls: int = 0
    seconds: float = 0.0


class WindowSmoothing:
    """Smooths module inputs by their requests' windows. One object per `apply`; not shared between threads."""

    def __init__(self, config: SmoothingConfig, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.cost = OwnCost()
        self.external = False  # whether an engine says what each step holds
        self.device = torch.device(device)
        largest = max(config.short_request.window_size, config.window_for(1 << 20))
        self.state = WindowState(largest - 1 + SPARE_TOKENS)
        self.dtype = DTYPES[config.precision]  # inputs are rounded to it, sums are float32: chunking must not show
        self._context: _Prepared | None = None

    def begin_step(self, context: StepContext) -> None:
        """Say whose tokens the next forward pass holds. Requests seen for the first time enter the state.

        Raises AttachError for an unknown request that does not begin at position 0: the window's earlier inputs are
        nowhere to be found, so an engine that reuses prefixes must compute them again under window smoothing.
        """
        for span in context.spans:
            if span.position > 0 and span.parameters.strength > 0 and not self.state.knows(span.request):
                raise AttachError(
                    f"window smoothing first sees request {span.request} at position {span.position}; a reused prefix "
                    "has no window, so compute the prompt from its start"
                )
        self.external = True
        self.prepare(context)

    def end_step(self) -> None:
        """The forward pass is over: a module called outside of one sees its input as it is."""
        self._context = None

    def prepare(self, context: StepContext) -> None:
        self._context = _Prepared(context, self.state, self)

    def release(self, request: Hashable) -> None:
        self.state.release(request)

    def smooth(self, module: str, x: Tensor) -> Tensor:
        """``x`` [..., channels], flattened to the step's tokens; returns a new tensor of the same shape and dtype.

        Rows after the step's last token (padding of a packed batch) are passed on as they are.
        """
        step = self._context
        if step is None or not step.any_smoothed:
            return x
        began = time.perf_counter()
        rows = x.detach().reshape(-1, x.shape[-1])
        if rows.shape[0] < step.num_tokens:
            raise AttachError(
                f"{module} saw {rows.shape[0]} tokens in a step of {step.num_tokens}; window smoothing needs every "
                "token in order, so leave this module out of target_layers"
            )
        ring = self.state.ring(module, rows.shape[1], rows)
        if step.single is not None:
            y = self._decode(rows[: step.num_tokens], ring, step.single)
            if rows.shape[0] > step.num_tokens:
                y = torch.cat((y, rows[step.num_tokens :]))
        else:
            y = rows.clone()
            for span in step.context.spans:
                self._span(rows, y, ring[self.state.slot(span.request)], span)
        self.cost.calls += 1
        self.cost.seconds += time.perf_counter() - began
        return y.view(x.shape)

    def _span(self, rows: Tensor, y: Tensor, ring: Tensor, span: Span) -> None:
        """All tokens of one request in this step, with the window's earlier tokens before them."""
        x = rows[span.start : span.start + span.length]
        window, strength = span.parameters.window, span.parameters.strength
        before = min(window - 1, span.position)
        if strength > 0.0:
            back = torch.arange(span.position - before, span.position) % self.ring_tokens
            line = torch.cat((ring[back.to(ring.device)], x)).to(self.dtype).float()
            first = span.position - before
            mean, count = _causal_mean(line, window, first, self.first_position)
            target = slice(before, before + span.length)
            position = torch.arange(span.position, span.position + span.length, device=x.device)
            active = self.is_active(position, count[target], window)
            a = (strength * active)[:, None]
            smoothed = (1 - a) * line[target] + a * mean[target]
            y[span.start : span.start + span.length] = torch.where(active[:, None], smoothed.to(x.dtype), x)
        kept = min(span.length, self.ring_tokens)
        last = torch.arange(span.position + span.length - kept, span.position + span.length) % self.ring_tokens
        ring[last.to(ring.device)] = x[-kept:]

    def _decode(self, rows: Tensor, ring: Tensor, step: _SingleTokens) -> Tensor:
        """One token per request: all of them at once, as one product with the step's weights."""
        ring[step.slots, step.newest] = rows
        window = ring[step.slots[:, None], step.back].to(self.dtype).float()
        smoothed = torch.bmm(step.weights[:, None], window)[:, 0].to(rows.dtype)
        return smoothed if step.all_active else torch.where(step.active[:, None], smoothed, rows)

    @property
    def ring_tokens(self) -> int:
        return self.state.ring_tokens

    @property
    def first_position(self) -> int:
        """The first position that takes part: with ``skip_sink`` the first token neither smooths nor is smoothed."""
        return 1 if self.config.skip_sink else 0

    def is_active(self, position: Tensor, count: Tensor, window: Tensor | int) -> Tensor:
        """Which tokens are changed at all."""
        return (position >= self.first_position) & ((count >= window) if self.config.warmup == "skip" else (count > 0))


class _SingleTokens:
    """A step in which every request has one token: what all modules share, computed once.

    ``weights`` [requests, reach] are those of the formula, the token itself first; a position that takes no part has
    weight 0 and points at the token itself, so that nothing stale can come in, not even as 0 times NaN.
    """

    def __init__(self, spans: Sequence[Span], state: WindowState, smoothing: WindowSmoothing) -> None:
        device, ring = smoothing.device, state.ring_tokens
        self.slots = torch.tensor([state.slot(span.request) for span in spans], device=device)
        position = torch.tensor([span.position for span in spans], device=device)
        window = torch.tensor([span.parameters.window for span in spans], device=device)
        strength = torch.tensor([span.parameters.strength for span in spans], device=device)
        offset = torch.arange(max(span.parameters.window for span in spans), device=device)
        earlier = position[:, None] - offset
        valid = ((earlier >= smoothing.first_position) & (offset < window[:, None])) | (offset == 0)
        count = valid.sum(1)
        self.active = smoothing.is_active(position, count, window) & (strength > 0)
        self.all_active = bool(self.active.all())
        self.newest = position % ring
        self.back = torch.where(valid, earlier, position[:, None]) % ring
        a = (strength * self.active)[:, None]
        self.weights = (valid * a / count[:, None] + (offset == 0) * (1 - a)).float()


class _Prepared:
    def __init__(self, context: StepContext, state: WindowState, smoothing: WindowSmoothing) -> None:
        self.context = context
        self.num_tokens = max((span.start + span.length for span in context.spans), default=0)
        for span in context.spans:
            state.slot(span.request)
        # without an engine a request may yet outgrow the short ones, so its window is kept
        self.any_smoothed = not smoothing.external or any(span.parameters.strength > 0 for span in context.spans)
        packed = all(span.length == 1 and span.start == index for index, span in enumerate(context.spans))
        self.single = _SingleTokens(context.spans, state, smoothing) if packed and context.spans else None


def _causal_mean(line: Tensor, window: int, first: int, skip: int) -> tuple[Tensor, Tensor]:
    """Mean of the last ``window`` rows at every row of ``line`` [n, channels], and how many rows each mean has.

    ``first`` is the position of line[0]; positions below ``skip`` take no part. Shifted sums instead of a running sum:
    a running sum would carry rounding errors of the whole prompt along.
    """
    n = line.shape[0]
    part = (torch.arange(first, first + n, device=line.device) >= skip).to(line.dtype)[:, None]
    masked = line * part
    total, count = masked.clone(), part.clone()
    for shift in range(1, min(window, n)):
        total[shift:] += masked[: n - shift]
        count[shift:] += part[: n - shift]
    return total / count.clamp_min(1), count[:, 0].to(torch.int64)


@dataclass
class _RowTracker:
    """Derives the step context from a plain transformers call: row i of the batch is request i."""

    smoothing: WindowSmoothing
    admitted: list[Parameters] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # tokens by which a row was judged
    restore: list[Any] = field(default_factory=list)

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.smoothing.external:
            return
        tokens = next(
            (t for t in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]) if t is not None), None
        )
        if tokens is None:
            raise AttachError("window smoothing cannot see this call's tokens; pass input_ids or inputs_embeds")
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        past = int(cache.get_seq_length()) if cache is not None else 0
        batch, length = tokens.shape[:2]
        pads = _left_pads(kwargs.get("attention_mask"), batch)
        if past == 0:
            self.smoothing.state.clear()
            self.lengths = [length - pad for pad in pads]
            self.admitted = [parameters_for(self.smoothing.config, n) for n in self.lengths]
        if len(self.admitted) != batch:
            raise AttachError(
                f"window smoothing saw a prompt of {len(self.admitted)} rows and now {batch}; start from an empty cache"
            )
        self._outgrow([past + length - pad for pad in pads])
        spans = []
        for row, pad in enumerate(pads):
            skipped = min(length, max(0, pad - past))
            spans.append(Span(row, row * length + skipped, length - skipped, past + skipped - pad, self.admitted[row]))
        self.smoothing.prepare(StepContext(tuple(spans)))
        self._follow_reorder(cache)

    def _outgrow(self, lengths: list[int]) -> None:
        """A plain call does not say how long a request will become: it is short until it is longer than that."""
        config = self.smoothing.config
        for row, now in enumerate(lengths):
            if self.lengths[row] <= config.short_request.max_tokens < now:
                self.lengths[row], self.admitted[row] = now, parameters_for(config, now)

    def _follow_reorder(self, cache: Any) -> None:
        """Beam search permutes the cache between steps; the windows must follow."""
        if cache is None or "reorder_cache" in vars(cache) or not hasattr(cache, "reorder_cache"):
            return
        original = cache.reorder_cache

        def reorder(beam_idx: Tensor) -> Any:
            self.smoothing.state.reorder(range(len(beam_idx)), beam_idx.tolist())
            return original(beam_idx)

        cache.reorder_cache = reorder
        self.restore.append(cache)

    def close(self) -> None:
        for cache in self.restore:
            vars(cache).pop("reorder_cache", None)


def _left_pads(mask: Any, batch: int) -> list[int]:
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return [0] * batch
    return [int(pad) for pad in (mask.cumsum(1) == 0).sum(1)]


@contextlib.contextmanager
def window_hooks(model: nn.Module, names: Sequence[str], config: SmoothingConfig) -> Iterator[WindowSmoothing]:
    """Smooth the inputs of the modules ``names`` until the `with` ends.

    Under plain `model(...)` or `generate` every batch row is a request that begins with an empty cache. An engine that
    packs requests calls `WindowSmoothing.begin_step` itself before each forward pass.
    """
    smoothing = WindowSmoothing(config, next(model.parameters()).device)
    tracker = _RowTracker(smoothing)
    handles: list[Any] = []
    try:
        handles.append(model.register_forward_pre_hook(tracker.before_forward, with_kwargs=True))
        handles.append(model.register_forward_hook(lambda *_: smoothing.end_step(), always_call=True))
        for name in names:
            handles.append(model.get_submodule(name).register_forward_pre_hook(_hook(smoothing, name)))
        yield smoothing
    finally:
        for handle in handles:
            handle.remove()
        tracker.close()


def _hook(smoothing: WindowSmoothing, name: str) -> Any:
    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (smoothing.smooth(name, args[0]), *args[1:])

    before.gsm_window = True  # type: ignore[attr-defined]
    return before


def is_window_smoothed(model: nn.Module) -> bool:
    """Whether window smoothing is in force on ``model``."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return any(getattr(hook, "gsm_window", False) for hook in hooks)
