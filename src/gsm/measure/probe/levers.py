"""What would help, by how much: each lever predicted cheaply, and measured when asked to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import torch

import gsm.integrations.transformers as hf
from gsm.measure.bench.arms import PLAIN, make_arm, resolve_arm
from gsm.measure.probe.linears import linear_seconds, matrices
from gsm.measure.probe.record import Growth, Lever
from gsm.measure.probe.spec import ProbeSpec
from gsm.measure.profile import Stepper
from gsm.models import LoadedModel, load_model
from gsm.quality import Arm, ModelSession, PlainArm, Progress
from gsm.results import Profile
from gsm.stats import summary

BATCH = 8
_BLOCKS = 3
_WARM_UP_STEPS = 4
KV_HOW = "decode steps over a cache of that length filled with random numbers"
DTYPE_HOW = "all matrix products in bfloat16, the rest of a step as it is"
BATCH_HOW = f"all matrix products for {BATCH} rows, and {BATCH} times attention and cache"


@dataclass
class Levers:
    """Predictions and measurements for one loaded model. ``prompt`` [batch, n >= the longest length]."""

    spec: ProbeSpec
    loaded: LoadedModel
    prompt: torch.Tensor
    progress: Progress

    # -- prediction ----------------------------------------------------------------------------------------------

    def predict(self, growth: Growth, profile: Profile, lengths: tuple[int, ...]) -> Iterator[Lever]:
        """One `Lever` per length and lever, those of the cache first."""
        total, done = len(lengths) * len(self.spec.levers), 0
        for length in lengths:
            for name in self.spec.levers:
                self.progress(f"predicting {name} at {length} tokens", done, total)
                arm = make_arm(resolve_arm(name), self.loaded, self.spec.chunk_tokens, self.spec.text)
                step_ms = self._noise_step_ms(arm, length, self.prompt.shape[0])
                yield _lever(name, length, KV_HOW, growth.at(length), step_ms)
                done += 1
        for length in lengths:
            yield from self._predict_weights(growth.at(length), profile, length)

    def _predict_weights(self, plain_ms: float, profile: Profile, length: int) -> Iterator[Lever]:
        model, linear_ms = self.loaded.model, profile.parts_ms["linear"]
        own = linear_seconds(model, self.prompt.shape[0])
        if model.dtype == torch.float32 and _fits_twice(model):
            ratio = linear_seconds(model, self.prompt.shape[0], torch.bfloat16) / own
            yield _lever("bfloat16", length, DTYPE_HOW, plain_ms, plain_ms - linear_ms * (1 - ratio))
        if self.prompt.shape[0] == 1:
            ratio = linear_seconds(model, BATCH) / own
            fixed = sum(profile.parts_ms[part] for part in ("host", "other", "smoothing"))
            kv_ms = plain_ms - linear_ms - fixed
            step_ms = linear_ms * ratio + fixed + BATCH * max(0.0, kv_ms)
            yield _lever(f"batch {BATCH}", length, BATCH_HOW, plain_ms, step_ms / BATCH)

    def _noise_step_ms(self, arm: Arm, length: int, batch_size: int, loaded: LoadedModel | None = None) -> float:
        model = (loaded or self.loaded).model
        kv = hf.observe_kv(model, batch_size)
        with arm.open() as session:
            assert isinstance(session, ModelSession)
            hf.fill_with_noise(session.cache, kv, length)
            token = self.prompt[:1, :1].expand(batch_size, 1)
            return step_ms(session, token, num_blocks=1 if batch_size > self.prompt.shape[0] else _BLOCKS)

    # -- verification --------------------------------------------------------------------------------------------

    def verify(self, levers: tuple[Lever, ...]) -> Iterator[Lever]:
        """Every lever with what it really gives: real prompts for the cache's, the whole model for the weights'."""
        plain: dict[int, float] = {}
        for index, lever in enumerate(levers):
            length = lever.context_tokens
            if length not in plain:
                self.progress(f"measuring {PLAIN} at {length} tokens", index, len(levers))
                plain[length] = self._real_step_ms(PLAIN, length)
            self.progress(f"measuring {lever.name} at {length} tokens", index, len(levers))
            yield _measured(lever, plain[length], self._measure(lever))

    def _measure(self, lever: Lever) -> float:
        length = lever.context_tokens
        if lever.how == BATCH_HOW:
            return self._noise_step_ms(PlainArm(self.loaded.model), length, BATCH) / BATCH
        if lever.how == DTYPE_HOW:
            spec = self.spec
            loaded = load_model(spec.model, dtype="bfloat16", threads=spec.threads, device=spec.device)
            return self._noise_step_ms(PlainArm(loaded.model), length, self.prompt.shape[0], loaded)
        return self._real_step_ms(lever.name, length)

    def _real_step_ms(self, name: str, length: int) -> float:
        arm = make_arm(resolve_arm(name), self.loaded, self.spec.chunk_tokens, self.spec.text)
        with arm.open() as session:
            assert isinstance(session, ModelSession)
            token = session.prefill(self.prompt[:, :length]).argmax(-1, keepdim=True)
            return step_ms(session, token)


def step_ms(session: ModelSession, token: torch.Tensor, num_blocks: int = _BLOCKS) -> float:
    """Milliseconds per decode step: the median over blocks of 16, after a few steps that are thrown away."""
    stepper = Stepper(session, token)
    stepper.plain_block(_WARM_UP_STEPS)
    blocks = [stepper.plain_block() for _ in range(num_blocks)]
    return 1e3 * (summary([sum(block) / len(block) for block in blocks])["median"] or 0.0)


def _lever(name: str, length: int, how: str, plain_ms: float, predicted_ms: float) -> Lever:
    return Lever(
        name=name,
        context_tokens=length,
        how=how,
        plain_ms=plain_ms,
        predicted_ms=predicted_ms,
        predicted_gain=plain_ms / predicted_ms,
    )


def _measured(lever: Lever, plain_ms: float, measured_ms: float) -> Lever:
    gain = plain_ms / measured_ms
    return lever.model_copy(
        update={
            "measured_plain_ms": plain_ms,
            "measured_ms": measured_ms,
            "measured_gain": gain,
            "error": lever.predicted_gain / gain - 1,
        }
    )


def _fits_twice(model: torch.nn.Module) -> bool:
    """Whether half of the weights' bytes are free once more, with room to spare."""
    needed = sum(w.nbytes for w in matrices(model)) // 2
    device = next(model.parameters()).device
    free: int = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return needed < 0.7 * free
