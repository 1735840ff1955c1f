"""What would help, by how much: each lever predicted cheaply, and measured when asked to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import torch

from gsm.measure.bench.arms import LINEAR, make_arm, resolve_arm
from gsm.measure.probe.record import Lever
from gsm.measure.probe.spec import ProbeSpec
from gsm.measure.probe.turns import Contender, gain, take_turns, with_noise, with_text
from gsm.models import LoadedModel, load_model
from gsm.models.weights import weight_bytes
from gsm.quality import GsmArm, PlainArm, Progress
from gsm.stats import summary

BATCH = 8
_SHORT = 16  # tokens in a cache that costs next to nothing
_FEW_ROUNDS = 3  # for the batch: its steps are long
KV_HOW = "decode steps over a cache of that length filled with random numbers"
DTYPE_HOW = "what bfloat16 changes in a step with an empty cache"
LINEAR_HOW = "what GSM's linear layers change in a step with an empty cache"
BATCH_HOW = f"a step of {BATCH} sequences with empty caches, and {BATCH} times what the length adds"


@dataclass
class Levers:
    """Predictions and measurements for one loaded model. ``prompt`` [batch, n >= the longest length].

    ``empty_ms`` and ``full_ms`` are plain steps without and with the latest length's context, taken in turns.
    """

    spec: ProbeSpec
    loaded: LoadedModel
    prompt: torch.Tensor
    progress: Progress
    empty_ms: float | None = None
    full_ms: float | None = None
    _bfloat16: LoadedModel | None = field(default=None, repr=False)

    def predict(self, lengths: tuple[int, ...]) -> Iterator[Lever]:
        """Every lever at every length, all of one length in turns with plain transformers."""
        weights = self._weight_turns()
        for index, length in enumerate(lengths):
            self.progress(f"predicting at {length} tokens", index, len(lengths))
            arms = [self._arm(name) for name in self.spec.cache_levers]
            contenders = [self._noise(_SHORT), self._noise(length), *(self._noise(length, arm) for arm in arms)]
            empty, plain, *others = take_turns(contenders)
            self.empty_ms, self.full_ms = _median(empty), _median(plain)
            for name, turns in zip(self.spec.cache_levers, others, strict=True):
                yield _lever(name, length, KV_HOW, self.full_ms, gain(plain, turns))
            yield from self._predict_weights(weights, length)

    def _weight_turns(self) -> dict[str, float]:
        """Milliseconds of a step with an empty cache: as it is, by GSM's linear layers, in bfloat16, and of a batch."""
        self.progress("predicting linear layers, bfloat16 and batches", 0, 1)
        contenders = {"plain": self._noise(_SHORT)}
        if LINEAR in self.spec.levers:
            contenders[LINEAR] = self._noise(_SHORT, self._linear_arm())
        if "bfloat16" in self.spec.levers and self._can_use_bfloat16():
            contenders["bfloat16"] = self._noise(_SHORT, self._bfloat16_arm())
        if "batch" in self.spec.levers and self.prompt.shape[0] == 1:
            contenders["batch"] = with_noise(self._plain(), _SHORT, BATCH)
        if len(contenders) == 1:
            return {}
        turns = dict(zip(contenders, take_turns(list(contenders.values())), strict=True))
        plain = _median(turns["plain"])
        return {name: plain / gain(turns["plain"], ms) for name, ms in turns.items()}

    def _predict_weights(self, weights: dict[str, float], length: int) -> Iterator[Lever]:
        assert self.full_ms is not None
        assert self.empty_ms is not None
        plain, length_ms = self.full_ms, max(0.0, self.full_ms - self.empty_ms)
        for name, how in ((LINEAR, LINEAR_HOW), ("bfloat16", DTYPE_HOW)):
            if name in weights:
                step_ms = length_ms + self.empty_ms * weights[name] / weights["plain"]
                yield _lever(name, length, how, plain, plain / step_ms)
        if "batch" in weights:
            step_ms = BATCH * length_ms + self.empty_ms * weights["batch"] / weights["plain"]
            yield _lever(f"batch {BATCH}", length, BATCH_HOW, plain, BATCH * plain / step_ms)

    # -- verification --------------------------------------------------------------------------------------------

    def verify(self, levers: tuple[Lever, ...]) -> Iterator[Lever]:
        """Every lever with what it really gives: real prompts for the cache's, whole models for the weights'."""
        done = 0
        for length in dict.fromkeys(lever.context_tokens for lever in levers):
            here = [lever for lever in levers if lever.context_tokens == length]
            by_text = [lever for lever in here if lever.how == KV_HOW]
            if by_text:
                self.progress(
                    f"measuring {', '.join(lever.name for lever in by_text)} at {length} tokens", done, len(levers)
                )
                prompt = self.prompt[:, :length]
                arms: list[PlainArm | GsmArm] = [self._plain(), *(self._arm(lever.name) for lever in by_text)]
                plain, *others = take_turns([with_text(arm, prompt) for arm in arms])
                for lever, turns in zip(by_text, others, strict=True):
                    yield _measured(lever, _median(plain), gain(plain, turns))
                done += len(by_text)
            for lever in here:
                if lever.how == KV_HOW:
                    continue
                self.progress(f"measuring {lever.name} at {length} tokens", done, len(levers))
                yield self._measure_weights(lever, length)
                done += 1

    def _measure_weights(self, lever: Lever, length: int) -> Lever:
        if lever.how in (LINEAR_HOW, DTYPE_HOW):
            arm = self._linear_arm() if lever.how == LINEAR_HOW else self._bfloat16_arm()
            plain, other = take_turns([self._noise(length), self._noise(length, arm)])
            return _measured(lever, _median(plain), gain(plain, other))
        batch = with_noise(self._plain(), length, BATCH)
        plain, other = take_turns([self._noise(length), batch], _FEW_ROUNDS)
        return _measured(lever, _median(plain), BATCH * gain(plain, other))

    # -- arms ----------------------------------------------------------------------------------------------------

    def _plain(self) -> PlainArm:
        return PlainArm(self.loaded.model, chunk_tokens=self.spec.chunk_tokens)

    def _linear_arm(self) -> PlainArm:
        return PlainArm(self.loaded.model, chunk_tokens=self.spec.chunk_tokens, linear="auto")

    def _arm(self, name: str) -> GsmArm:
        arm = make_arm(resolve_arm(name), self.loaded, self.spec.chunk_tokens, self.spec.text)
        assert isinstance(arm, GsmArm)  # the spec refuses others
        return arm

    def _noise(self, num_tokens: int, arm: PlainArm | GsmArm | None = None) -> Contender:
        return with_noise(arm or self._plain(), num_tokens, self.prompt.shape[0])

    def _can_use_bfloat16(self) -> bool:
        """Float32 weights, and room for them once more in half the size."""
        model = self.loaded.model
        device = model.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
        return model.dtype == torch.float32 and weight_bytes(model) / 2 < 0.7 * free

    def _bfloat16_arm(self) -> PlainArm:
        if self._bfloat16 is None:
            spec = self.spec
            self._bfloat16 = load_model(spec.model, dtype="bfloat16", threads=spec.threads, device=spec.device)
        return PlainArm(self._bfloat16.model, chunk_tokens=self.spec.chunk_tokens)


def _lever(name: str, length: int, how: str, plain_ms: float, predicted_gain: float) -> Lever:
    return Lever(
        name=name,
        context_tokens=length,
        how=how,
        plain_ms=plain_ms,
        predicted_ms=plain_ms / predicted_gain,
        predicted_gain=predicted_gain,
    )


def _measured(lever: Lever, plain_ms: float, measured_gain: float) -> Lever:
    return lever.model_copy(
        update={
            "measured_plain_ms": plain_ms,
            "measured_ms": plain_ms / measured_gain,
            "measured_gain": measured_gain,
            "error": lever.predicted_gain / measured_gain - 1,
        }
    )


def _median(values: list[float]) -> float:
    median = summary(values)["median"]
    assert median is not None
    return median
