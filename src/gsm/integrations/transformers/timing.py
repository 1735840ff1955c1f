"""Time the parts of a forward pass: everything a decode step is made of is wrapped, and unwrapped at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gsm.attention.base import DecodeAttention, DecodeResult
from gsm.core.view import AttentionSpec, KVView, Selection
from gsm.integrations.transformers.cache import Cache

F = TypeVar("F", bound=Callable[..., Any])

LINEAR, ATTENTION, MASS, CACHE, SMOOTHING, HOST = "linear", "attention", "mass", "cache_writes", "smoothing", "host"


class Timer(Protocol):
    """Whatever charges a function's own time, without that of timed functions inside it, to a label."""

    def timed(self, label: str, function: F) -> F: ...


@dataclass
class Replay:
    """The pages that the layers of a decode step chose, so that later steps can read them without choosing.

    While ``active``, every layer attends what it last chose and whatever pages began since. What such a step saves
    against a usual one is the time that choosing takes, with caches as cold as they really are.
    """

    active: bool = False
    chosen: dict[int, tuple[Tensor, int]] = field(default_factory=dict)  # by decode call: pages [B, H, S], of how many

    @property
    def is_ready(self) -> bool:
        """Whether every head of every layer read the same number of pages: only those can be put side by side."""
        return bool(self.chosen) and all(bool((pages >= 0).all()) for pages, _ in self.chosen.values())


@contextmanager
def timed_parts(model: PreTrainedModel, cache: Any, timer: Timer, replay: Replay | None = None) -> Iterator[None]:
    """Inside the `with` block ``timer`` sees the parts of every forward pass of ``model`` with ``cache``.

    Labels: ``linear`` (modules with weight matrices), ``attention`` (choosing pages included), ``mass``,
    ``cache_writes``, ``smoothing``, and ``host.<what>`` for the rest: norms, activations, rotary embeddings, residuals
    and the Python around them. ``cache`` is a `gsm.Cache` or a transformers cache. Not for models that run in several
    threads: the attention function is exchanged in transformers' registry meanwhile.
    """
    with ExitStack() as undo:
        implementation = model.config._attn_implementation
        registered = implementation in ALL_ATTENTION_FUNCTIONS.valid_keys()
        if registered:
            _time_attention(undo, implementation, timer, HOST if isinstance(cache, Cache) else ATTENTION)
        for module in model.modules():
            _set(undo, module, "forward", timer.timed(_label(module, registered), module.forward))
            _time_hooks(undo, module, timer)
        _set(undo, cache, "update", timer.timed(CACHE, cache.update))
        if isinstance(cache, Cache):
            _time_cache(undo, cache, timer, replay or Replay())
        yield


def _label(module: nn.Module, attention_is_timed: bool) -> str:
    """What a module's own time is, without its sub-modules'."""
    name = type(module).__name__
    if type(module).__module__.startswith("gsm.smoothing") and any(True for _ in module.children()):
        return SMOOTHING
    owns_matrix = any(p.ndim >= 2 for p in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    if owns_matrix and not isinstance(module, nn.Embedding):
        return LINEAR
    if not attention_is_timed and "attention" in name.lower():
        return ATTENTION  # eager attention is part of its module
    return f"{HOST}.{name}"


def _time_hooks(undo: ExitStack, module: nn.Module, timer: Timer) -> None:
    """Hooks run outside of `forward`; those of smoothing are worth knowing."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "__module__", "").startswith("gsm.smoothing"):
                hooks[key] = timer.timed(SMOOTHING, hook)
                undo.callback(hooks.__setitem__, key, hook)


def _time_attention(undo: ExitStack, implementation: str, timer: Timer, label: str) -> None:
    function = ALL_ATTENTION_FUNCTIONS[implementation]
    if label == HOST:  # ours: a thin layer over what is timed by itself
        label = f"{HOST}.attention call"
    ALL_ATTENTION_FUNCTIONS[implementation] = timer.timed(label, function)
    undo.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, implementation, function)


def _time_cache(undo: ExitStack, cache: Cache, timer: Timer, replay: Replay) -> None:
    begin = cache.begin

    def timed_begin(*args: Any, **kwargs: Any) -> Any:
        step = begin(*args, **kwargs)
        backend, calls = step._backend, _Calls(replay)
        step._backend = lambda device: _TimedDecode(backend(device), timer, calls)  # type: ignore[method-assign]
        step.kv.observe = timer.timed(MASS, step.kv.observe)  # type: ignore[method-assign]
        return step

    _set(undo, cache, "begin", timer.timed(CACHE, timed_begin))
    _set(undo, cache, "end", timer.timed(CACHE, cache.end))
    for group in cache.manager.groups:
        _set(undo, group, "observe", timer.timed(MASS, group.observe))


class _Calls:
    """Counts the decode calls of one forward pass: the n-th is always the same layer's."""

    def __init__(self, replay: Replay):
        self.replay, self.index = replay, 0


class _TimedDecode(DecodeAttention):
    def __init__(self, inner: DecodeAttention, timer: Timer, calls: _Calls):
        self.name, self._calls = inner.name, calls
        self._decode = timer.timed(ATTENTION, inner.decode)

    def decode(self, query: Tensor, view: KVView, spec: AttentionSpec, selection: Selection | None) -> DecodeResult:
        replay, index = self._calls.replay, self._calls.index
        self._calls.index += 1
        if replay.active and index in replay.chosen:
            view, selection = chosen_only(view, *replay.chosen[index]), None
        result = self._decode(query, view, spec, selection)
        if selection is not None and spec.most_visible is None:
            replay.chosen[index] = (result.pages, view.max_pages)
        return result


def chosen_only(view: KVView, pages: Tensor, num_then: int) -> KVView:
    """A view whose sequences consist of the logical ``pages [B, H, S]`` and those from ``num_then`` on, in order.

    Attention does not ask where a key is: rotary embeddings are already in it. Not for layers with a window.
    """
    new = torch.arange(num_then, view.max_pages, device=pages.device).expand(*pages.shape[:2], -1)
    kept = torch.cat((pages.sort(dim=-1).values, new), dim=-1)
    table = view.table[view.slots].gather(-1, kept)
    num_pages = kept.shape[-1]
    in_last = (view.seq_lens - 1) % view.page_size + 1
    return replace(
        view,
        table=table.contiguous(),
        slots=torch.arange(len(view.slots), device=pages.device),
        seq_lens=(num_pages - 1) * view.page_size + in_last,
        max_pages=num_pages,
    )


def _set(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Shadow a method on one object; undoing uncovers it."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    undo.callback(delattr, owner, name) if before is None else undo.callback(setattr, owner, name, before)
