"""A transformers cache whose bytes live in a `KVManager`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache as TransformersCache
from transformers import PretrainedConfig, PreTrainedModel

from gsm.arch import ModelArch, describe
from gsm.config import ConfigLike, GsmConfig, load_config
from gsm.core.batch import Span
from gsm.core.view import Window
from gsm.errors import AttachError, ConfigError, KVError
from gsm.integrations.transformers.grading import LOWERED_TIERS, Grader, make_grader, needs_cold_pool
from gsm.integrations.transformers.latent import is_latent
from gsm.integrations.transformers.states import States, make_layers, twin_layers
from gsm.integrations.transformers.step import AttentionStep
from gsm.kv.compact import make_compactor
from gsm.kv.grading import lower
from gsm.kv.manager import KVManager
from gsm.kv.policies.graded import range_tiers
from gsm.kv.positions import Place, PositionMap
from gsm.kv.report import KVStats


class Cache(TransformersCache):
    """Pass it as `past_key_values=` (or `cache=`) to a model inside `gsm.attach`.

    Left- or right-padding is not stored: every row is a sequence of its real tokens, while `get_seq_length()` counts
    columns, as transformers expects. `tokenizer` is needed where the config grades thoughts. Raises AttachError when
    the model is not attached, ConfigError without a tokenizer that is needed.
    """

    # transformers asks these of every cache
    is_compileable = False
    _grades_rows = True  # whether rows are the sequences, so that thoughts are followed here

    def __init__(
        self, model: PreTrainedModel | PretrainedConfig, config: ConfigLike = None, tokenizer: Any = None
    ) -> None:
        self.model_config = model.config if isinstance(model, PreTrainedModel) else model
        self.arch = describe(self.model_config)
        super().__init__(layers=make_layers(self.model_config, self.arch))
        self.gsm_config = load_config(config)
        self.tokenizer = tokenizer
        settings, windows = self.gsm_config, layer_windows(self.arch)
        if self._grades_rows:
            check_grading(settings, tokenizer)
        has_cold = needs_cold_pool(settings.reasoning, settings.prompt.history)
        manager = KVManager(
            len(self.arch.layers), settings.cache, None, windows, has_cold, needs_mass=settings.reasoning.weighs
        )
        self._adopt(manager, [], 0)
        self.manager.compactor = make_compactor(self.gsm_config.cache, self.arch)

    def _adopt(self, manager: KVManager, slots: list[int], num_columns: int) -> None:
        self.states = States(self.layers)
        self.manager = manager
        self.slots = slots
        self.num_columns = num_columns
        self.step: AttentionStep | None = None
        self._pieces: dict[int, str] = {}  # texts of tokens, for the graders
        self.graders: list[Grader] = []  # of every row, where thoughts are graded
        self._input_ids: Tensor | None = None
        self._finalizer = weakref.finalize(self, manager.abandon, slots)

    def fork(self) -> Cache:
        """A second cache with the same content; pages are shared until one of the two writes."""
        twin: Cache = type(self).__new__(type(self))
        TransformersCache.__init__(twin, layers=twin_layers(self.layers))
        twin.model_config, twin.arch, twin.gsm_config = self.model_config, self.arch, self.gsm_config
        twin.tokenizer = self.tokenizer
        twin._adopt(self.manager, [self.manager.fork(slot) for slot in self.slots], self.num_columns)
        twin.graders = [grader.copy() for grader in self.graders]
        return twin

    def free(self) -> None:
        """Give all pages back now instead of when the cache is collected. The cache is empty afterwards."""
        _free_slots(self.manager, self.slots)
        self.graders.clear()
        self.num_columns = 0
        self.layers = make_layers(self.model_config, self.arch)
        self.states = States(self.layers)

    def stats(self) -> KVStats:
        """Bytes and pages by tier. Forks share a manager: its numbers cover them all."""
        stats = self.manager.stats()
        if not self.layers:
            return stats
        states = self.states.nbytes
        by_tier = {**stats.bytes_by_tier, "states": states}
        return replace(
            stats, kv_bytes=stats.kv_bytes + states, kv_pool_bytes=stats.kv_pool_bytes + states, bytes_by_tier=by_tier
        )

    def explain(self, row: int = 0, token: int | None = None) -> PositionMap | list[Place]:
        """Where the tokens of a row are, or why and when they went: the whole map, or one token's places.

        `token` counts real tokens: padding has no position. Raises KVError for a row or token that does not exist.
        """
        if not 0 <= row < len(self.slots):
            raise KVError(f"there is no row {row}: the cache holds {len(self.slots)} sequences; ask for 0 to n - 1")
        positions = self.manager.explain(self.slots[row])
        return positions if token is None else positions.token(token)

    def lower(self, ranges: Sequence[tuple[int, int]], tier: str = "drop", row: int = 0) -> None:
        """Bring the pages of token ranges of a row down to `tier` ("int4" or "drop"): old turns, for example.

        Positions stay, nothing is recomputed. Sinks, recent tokens and pages that also hold other tokens stay as they
        are. int4 needs a config with `reasoning.enabled` or `prompt.history.tier: int4`, else pages stay as codes.
        """
        if tier not in LOWERED_TIERS:
            raise KVError(f"there is no tier {tier!r} to go down to; use int4 or drop")
        if not 0 <= row < len(self.slots):
            raise KVError(f"there is no row {row}: the cache holds {len(self.slots)} sequences; ask for 0 to n - 1")
        slot = self.slots[row]
        tiers = range_tiers(ranges, LOWERED_TIERS[tier], self.manager.num_tokens(slot), self.gsm_config.cache.page_size)
        lower(self.manager, slot, tiers, "history")

    # -- one forward pass, driven by the hooks of `attach` -----------------------------------------------------

    def begin(self, rows: int, columns: int, mask: Tensor | None) -> AttentionStep:
        """Open a step for input `[rows, columns]`; `mask` is transformers' 2-D padding mask or None."""
        if self.slots and len(self.slots) != rows:
            raise AttachError(
                f"the cache holds {len(self.slots)} sequences but the input has {rows} rows; start a new one"
            )
        self.states.check()
        while len(self.slots) < rows:
            self.slots.append(self.manager.add_sequence())
        while self.gsm_config.reasoning.enabled and len(self.graders) < rows:
            grader = make_grader(self.tokenizer, self.gsm_config.reasoning, pieces=self._pieces)
            assert grader is not None
            self.graders.append(grader)
        spans = [_span(slot, row, columns, mask) for row, slot in enumerate(self.slots)]
        self.step = AttentionStep(self.manager.begin([s for s in spans if s.num_tokens]), self.gsm_config.cache)
        return self.step

    @property
    def is_endless(self) -> bool:
        """Whether positions are compacted, so that the trained window does not bound the number of tokens."""
        return self.gsm_config.cache.positions == "compact"

    def position_ids(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """The positions of the new tokens in the store, int64 `[rows, columns]`; 0 for padding."""
        positions = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        if self.step is not None:
            for span, past in zip(self.step.kv.spans, self.step.kv.past_lens, strict=True):
                new = torch.arange(past, past + span.num_tokens, device=device)
                positions[span.row, span.start : span.start + span.num_tokens] = new
        return positions

    def end(self, columns: int) -> None:
        """The forward pass succeeded."""
        if self.step is not None:
            self.step.kv.commit()
            if self.graders:
                self._grade(self.step)
            self.step = None
            self.num_columns += columns

    def note_input(self, input_ids: Tensor | None) -> None:
        """The ids `[rows, columns]` of the step that has just begun. Raises AttachError where they are needed."""
        if self.graders and input_ids is None:
            raise AttachError("grading thoughts needs token ids, not inputs_embeds; set reasoning.enabled: false")
        self._input_ids = input_ids

    def _grade(self, step: AttentionStep) -> None:
        assert self._input_ids is not None
        for span in step.kv.spans:
            ids = self._input_ids[span.row, span.start : span.start + span.num_tokens].tolist()
            self.graders[span.row].advance(self.manager, span.slot, ids)

    def cancel(self) -> None:
        """The forward pass failed: nothing of it stays."""
        if self.step is not None:
            self.step.kv.abort()
            self.step = None
            self.states.spoil()

    # -- what transformers calls -------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.step is None:
            raise AttachError("gsm.Cache was given to a model that is not attached; use `with gsm.attach(model):`")
        layer = self.arch.layers[layer_idx]
        if is_latent(layer, key_states, value_states):
            keys = torch.cat((key_states, value_states), dim=-1)
            self.step.latents[layer_idx] = keys
            self.step.kv.write(layer_idx, keys, keys[..., :0])
        else:
            self.step.kv.write(layer_idx, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_columns

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.num_columns + length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    @property
    def is_croppable(self) -> bool:
        return self.states.is_croppable

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # an empty list would read as "all linear" and generate would feed the whole prompt again

    @property
    def is_dummy(self) -> list[bool]:
        return [False]

    @property
    def batch_size(self) -> int:
        return len(self.slots) or -1

    def crop(self, max_length: int) -> None:
        """Remove `-max_length` columns from the end, or (older meaning) keep the first `max_length`."""
        remove = -max_length if max_length <= 0 else max(0, self.num_columns - max_length)
        self.states.check_crop(remove)
        for slot in self.slots:
            self.manager.crop(slot, max(0, self.manager.num_tokens(slot) - remove))
        for grader in self.graders:
            grader.crop(max(0, grader.num_seen - remove))
        self.states.crop(remove)
        self.num_columns = max(0, self.num_columns - remove)

    def reset(self) -> None:
        self.free()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Row i becomes what row `indices[i]` was (beam search)."""
        wanted = [self.slots[i] for i in indices.tolist()]
        new = [self.manager.fork(slot) for slot in wanted]
        _free_slots(self.manager, self.slots)
        self.slots.extend(new)
        if self.graders:
            self.graders = [self.graders[i].copy() for i in indices.tolist()]
        self.states.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.slots)).repeat_interleave(repeats))

    def __len__(self) -> int:
        return self.manager.num_layers

    def __repr__(self) -> str:
        return f"gsm.Cache({len(self.slots)} sequences, {self.num_columns} columns)"


def check_grading(config: GsmConfig, tokenizer: Any) -> None:
    """Raises ConfigError where thoughts are to be graded but cannot be."""
    if config.reasoning.enabled and tokenizer is None:
        raise ConfigError(
            "reasoning.enabled finds thoughts by their text; pass the tokenizer, as in "
            "gsm.attach(model, config, tokenizer=tokenizer)"
        )


def layer_windows(arch: ModelArch) -> list[Window | None]:
    """What `KVManager` must know of each layer: the bounded past it sees, or None."""
    return [Window(x.window, x.chunked) if x.window and x.kind == "sliding" else None for x in arch.layers]


def _free_slots(manager: KVManager, slots: list[int]) -> None:
    """`slots` is emptied in place: the finalizer holds the same list, and nothing may be freed twice."""
    while slots:
        manager.free(slots.pop())


def _span(slot: int, row: int, columns: int, mask: Tensor | None) -> Span:
    if mask is None:
        return Span(slot, row, 0, columns)
    real = mask[row, -columns:].nonzero().flatten()
    if len(real) == 0:
        return Span(slot, row, 0, 0)
    start, num_tokens = int(real[0]), len(real)
    if int(real[-1]) - start + 1 != num_tokens:
        raise KVError(f"row {row} of the attention mask has a hole between real tokens; pad on one side only")
    return Span(slot, row, start, num_tokens)
