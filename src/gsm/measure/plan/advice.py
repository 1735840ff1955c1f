"""From figures to a recommendation, including "not worth it"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gsm.measure.plan.record import Capacity, StepBytes
from gsm.measure.plan.weights import PlannedModel
from gsm.models.sizes import format_bytes

_WORTH_IT = 1.1  # below 10 % in both memory and time nobody will notice


@dataclass(frozen=True)
class Advice:
    verdict: str
    config: dict[str, Any] | None
    notes: tuple[str, ...]


def advise(
    model: PlannedModel, context: int, budget: int, capacities: tuple[Capacity, ...], steps: tuple[StepBytes, ...]
) -> Advice:
    """The verdict in one or two sentences, a config to start from, and what the figures leave out."""
    arch = model.arch
    if arch.support == "not_worth_it":
        verdict = f"KV tiering is not worth it here, because {arch.support_reason}."
        return Advice(_with_helps(verdict, arch.helps_instead), None, ())
    if arch.support == "refused":
        return Advice(
            _with_helps(f"GSM does not manage this cache: {arch.support_reason}.", arch.helps_instead), None, ()
        )
    if budget <= 0:
        verdict = f"Nothing is left for the cache ({format_bytes(budget)}): use quantised weights or more memory."
        return Advice(verdict, None, ())
    plain, tiers = capacities[0], capacities[1]
    saving = plain.bytes_at_context / tiers.bytes_at_context
    here = next((step for step in steps if step.context_tokens == context), None)
    gain = max((here.max_gain, here.max_gain_batched or 1.0)) if here else None
    return Advice(
        _verdict(context, _memory(saving, tiers.name), saving, here, gain),
        _config(context, budget, capacities, gain),
        _notes(model, here),
    )


def _with_helps(verdict: str, helps: tuple[str, ...]) -> str:
    return f"{verdict} What does help: {'; '.join(helps)}." if helps else verdict


def _verdict(context: int, memory: str, saving: float, here: StepBytes | None, gain: float | None) -> str:
    memory = f"At {context} tokens {memory}"
    if here is None or gain is None:
        return f"{memory}. Give --weights for the bound on speed."
    many = f" ({here.max_gain_batched:.2f} times with as many as fit)" if here.max_gain_batched else ""
    speed = f"reading less KV can make a decode step at most {here.max_gain:.2f} times faster{many}"
    if saving < _WORTH_IT and gain < _WORTH_IT:
        return f"Little to win. {memory}, and {speed}: KV is {here.kv_share:.0%} of what a step reads."
    if gain < _WORTH_IT:
        return f"{memory}. There is little speed to win: {speed}; the weights come first (quantise them)."
    return f"{memory}, and {speed}. Measure it: gsm bench."


def _memory(saving: float, name: str) -> str:
    if saving >= _WORTH_IT:
        return f"the cache takes {saving:.1f} times less memory with {name}"
    if saving * _WORTH_IT > 1:
        return f"the cache takes about as much memory with {name}"
    return f"the cache takes {1 / saving:.1f} times more memory with {name} than in plain transformers"


def _config(context: int, budget: int, capacities: tuple[Capacity, ...], gain: float | None) -> dict[str, Any]:
    """int8 unless only int4 lets one sequence of the context fit; sparse where the bound is worth it."""
    cache: dict[str, Any] = {"hot_size": _hot_size(context)}
    if len(capacities) == 3:
        int8_fits, int4_fits = (row.bytes_at_context <= budget for row in capacities[1:])
        if not int8_fits and int4_fits:
            cache["warm"] = {"codec": "int4"}
    if gain is None or gain >= _WORTH_IT:
        cache["sparse"] = {"enabled": True}
    return {"cache": cache}


def _hot_size(context: int) -> int:
    """512 up to 8k tokens, then a sixteenth of the context as a power of two, at most 4096."""
    size = 512
    while size * 2 <= min(context // 16, 4096):
        size *= 2
    return size


def _notes(model: PlannedModel, here: StepBytes | None) -> tuple[str, ...]:
    notes = [
        "Capacity counts pages in use; pools grow in steps of half, so reserved memory can be up to 1.5 times as much.",
    ]
    if here is not None:
        notes.append(
            "The bound compares bytes only. Plain transformers also copies its whole cache in every step, so the gain "
            "over it can be larger; host overhead makes it smaller."
        )
    if any(layer.kind == "sliding" for layer in model.arch.layers):
        notes.append(
            "Sliding layers keep the pages of their window only, in GSM as in plain transformers: there is less to win."
        )
    return tuple(notes)
