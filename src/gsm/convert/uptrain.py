"""A little further training of pooled attention, with the original model as teacher.

Two phases share the steps. First every attention layer learns alone: it gets the input that the teacher's layer got and
learns to give what the teacher's gave. That needs one forward pass of the teacher and no backward pass through anything
else, so a step is cheap, and layers cannot disturb one another. Then the whole student learns the teacher's
distribution over the next token (KL), which repairs what errors do to one another on the way up.

Trained are the attention's own projections (q, k, v, o; or the fused ones), nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gsm.errors import InputError, UnsupportedModel
from gsm.quality import Progress

SEQUENCE = 256  # tokens of a training sequence
LOCAL_SHARE = 0.5  # of the steps
_TRAINED = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_norm", "k_norm")
LOCAL_RATE, GLOBAL_RATE = 1e-3, 3e-4


@dataclass(frozen=True)
class Uptrained:
    """`first_loss` and `last_loss`: KL in nats per token, means over the first and last tenth of the second phase."""

    tokens: int
    trained_parameters: int
    cpu_s: float
    first_loss: float
    last_loss: float


def uptrain(
    teacher: Any, student: Any, ids: Tensor, steps: int, batch: int, progress: Progress, seed: int = 0
) -> Uptrained:
    """Train `student` in place on random stretches of `ids [n]`. Raises InputError when the text is too short."""
    if len(ids) < 4 * SEQUENCE:
        raise InputError(f"the training text has {len(ids)} tokens; give at least {4 * SEQUENCE}")
    start = time.process_time()
    generator = torch.Generator().manual_seed(seed)
    trained = _trainable(student)
    num_local = int(steps * LOCAL_SHARE)
    losses: list[float] = []
    try:
        with _gradients(student, trained):
            _learn_locally(teacher, student, _batches(ids, batch, num_local, generator), num_local, progress)
            parameters = list(trained.values())
            optimiser = torch.optim.AdamW(parameters, lr=GLOBAL_RATE, weight_decay=0.0)
            rate = _schedule(optimiser, steps - num_local)
            for index, tokens in enumerate(_batches(ids, batch, steps - num_local, generator)):
                progress("uptraining: whole model", num_local + index, steps)
                loss = _kl(teacher, student, tokens)
                optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimiser.step()
                rate.step()
                losses.append(loss.item())
    finally:
        student.eval()
    tenth = max(1, len(losses) // 10)
    return Uptrained(
        tokens=steps * batch * SEQUENCE,
        trained_parameters=sum(p.numel() for p in trained.values()),
        cpu_s=time.process_time() - start,
        first_loss=sum(losses[:tenth]) / tenth,
        last_loss=sum(losses[-tenth:]) / tenth,
    )


def _trainable(student: Any) -> dict[str, nn.Parameter]:
    found = {n: p for n, p in student.named_parameters() if any(f".{part}." in n for part in _TRAINED)}
    if not found:
        raise UnsupportedModel(f"{student.config.model_type} has no attention projections with known names to train")
    return found


@contextmanager
def _gradients(student: Any, trained: dict[str, nn.Parameter]) -> Iterator[None]:
    """Gradients for the trained parameters alone, whatever the model had before."""
    before = {name: p.requires_grad for name, p in student.named_parameters()}
    try:
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(name in trained)
        yield
    finally:
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(before[name])
            parameter.grad = None


def _batches(ids: Tensor, batch: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - SEQUENCE, (batch,), generator=generator).tolist()
        yield torch.stack([ids[s : s + SEQUENCE] for s in starts])


def _schedule(optimiser: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """A tenth of the steps up, then down to a tenth of the rate."""
    warm = max(1, steps // 10)
    return torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda s: min(1.0, (s + 1) / warm) * (1.0 - 0.9 * max(0, s - warm) / max(1, steps - warm))
    )


def _learn_locally(teacher: Any, student: Any, batches: Iterator[Tensor], steps: int, progress: Progress) -> None:
    pairs = list(zip(_attentions(teacher), _attentions(student), strict=True))
    parameters = [[p for p in own.parameters() if p.requires_grad] for _, own in pairs]
    optimiser = torch.optim.AdamW([p for layer in parameters for p in layer], lr=LOCAL_RATE, weight_decay=0.0)
    rate = _schedule(optimiser, steps)
    for index, tokens in enumerate(batches):
        progress("uptraining: layer by layer", index, steps)
        optimiser.zero_grad()

        def learn(layer: int, args: Any, kwargs: Any, output: Any) -> None:
            own = pairs[layer][1]
            with torch.enable_grad():
                got = own(*args, **kwargs)[0]
                wanted = output[0]
                # relative, so that layers with small outputs count as much as those with large ones
                loss = (got - wanted).square().mean() / wanted.square().mean().clamp_min(1e-12)
                loss.backward()
            nn.utils.clip_grad_norm_(parameters[layer], 1.0)

        hooks = [
            attention.register_forward_hook(
                lambda _, args, kwargs, output, layer=layer: learn(layer, args, kwargs, output), with_kwargs=True
            )
            for layer, (attention, _) in enumerate(pairs)
        ]
        try:
            with torch.no_grad():
                teacher(tokens, use_cache=False, logits_to_keep=1)
        finally:
            for hook in hooks:
                hook.remove()
        optimiser.step()
        rate.step()


def _attentions(model: Any) -> list[nn.Module]:
    """Attention modules in order of their layers."""
    found = [m for m in model.modules() if hasattr(m, "layer_idx") and (hasattr(m, "k_proj") or hasattr(m, "qkv_proj"))]
    if not found:
        raise UnsupportedModel(f"{model.config.model_type} has no attention modules with known names to train")
    return sorted(found, key=lambda module: int(module.layer_idx))


def _kl(teacher: Any, student: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        expected = torch.log_softmax(teacher(tokens, use_cache=False).logits.float(), dim=-1)
    got = torch.log_softmax(student(tokens, use_cache=False).logits.float(), dim=-1)
    return (expected.exp() * (expected - got)).sum(-1).mean()
