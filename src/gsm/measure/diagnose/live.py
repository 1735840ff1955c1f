"""Differential diagnosis: run the config, and where something is wrong, turn one suspect at a time and look again.

This is what the source documents tell their readers to do by hand: one variable per try, so that the cause is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gsm.config import GsmConfig, load_config
from gsm.kv.positions import REMOVED
from gsm.measure.diagnose.observe import Observation, Subject, beside_another, observe
from gsm.measure.diagnose.record import Checked, Finding, finding
from gsm.measure.diagnose.signals import grid_bits, key_values, kl_by_length, mean_kl, repeated_share
from gsm.models.weights import weight_read_bytes

STATISTICS_SHARE, BOOKKEEPING_SHARE = 0.01, 0.15
KV_SHARE = 0.2  # of the bytes a step reads; below it the cache cannot be what a step waits for
_HALVINGS = 6

Decode = Callable[[list[int]], str]


@dataclass
class Diagnosis:
    """A config under suspicion. `run` fills ``findings`` and ``checked``."""

    subject: Subject
    config: GsmConfig
    decode: Decode
    max_kl: float = 0.02
    tell: Callable[[str], None] = lambda what: None
    findings: list[Finding] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)

    def run(self) -> None:
        self.tell("the full cache")
        self.plain = observe(self.subject, None)
        self.tell("the config")
        self.seen = observe(self.subject, self.config)
        self._positions()
        if not self.seen.finite:
            self._not_finite()
        else:
            self._answers()
            self._speed()
        self._memory()

    # -- helpers -------------------------------------------------------------------------------------------------

    def found(self, cause: str, evidence: str, **more: Any) -> None:
        self.findings.append(finding(cause, evidence, **more))

    def check(self, what: str, answer: str) -> None:
        self.checked.append(Checked(what=what, found=answer))

    def again(self, what: str, changes: dict[str, Any]) -> Observation:
        """The same run with some settings replaced."""
        self.tell(what)
        return observe(self.subject, changed(self.config, changes))

    def kl(self, seen: Observation) -> float:
        return mean_kl(self.plain.logits, seen.logits) if seen.finite else float("inf")

    # -- the questions -------------------------------------------------------------------------------------------

    def _positions(self) -> None:
        wrong, integrity = self.seen.wrong_positions, self.seen.integrity
        if wrong:
            saw, want = wrong[0]
            evidence = f"the model was told position {saw} for the token at position {want}"
            self.found("positions-misaligned", evidence)
        if integrity:
            self.found("not-explained", f"the page tables disagree: {integrity}")
        self.check("positions the model was told", "wrong" if wrong else "right, every one")
        self.check("page tables and reference counts", integrity or "consistent")

    def _not_finite(self) -> None:
        where = self.seen.first_nonfinite or "the output"
        self.check("values", f"not finite, first at {where}")
        if not self.plain.finite:
            self.found("model-not-finite", f"plain transformers is not finite either, first at {where}")
            return
        section = self.config.smoothing
        in_fp32 = {"smoothing": {"precision": "fp32"}}
        if section.enable and section.precision != "fp32" and self.again("smoothing in fp32", in_fp32).finite:
            evidence = f"first not finite at {where}; with precision fp32 instead of {section.precision} all is finite"
            self.found("smoothing-precision", evidence)
            return
        if section.enable and self.again("without smoothing", {"smoothing": {"enable": False}}).finite:
            self.found("over-smoothing", f"first not finite at {where}; without smoothing all is finite")
            return
        codec = self.config.cache.warm.codec
        if codec != "none" and self.again("without a codec", _NO_CODEC).finite:
            bits = self._already_quantised()
            layers = ", ".join(map(str, self.seen.stats.nonfinite_pages)) if self.seen.stats else ""
            evidence = f"first not finite at {where}; with warm.codec: none instead of {codec} all is finite"
            evidence += f"; pages not finite in layers {layers}" if layers else ""
            self.found("double-compression" if bits else "codec-overflow", evidence)
            return
        self.found("not-explained", f"first not finite at {where}; neither smoothing nor the codec explains it")

    def _answers(self) -> None:
        """Wrong or repeated output: which suspect, turned off, removes most of the damage?"""
        kl = self.kl(self.seen)
        repeated, usual = repeated_share(self.seen.generated), repeated_share(self.plain.generated)
        self.check("distance to the full cache", f"KL {kl:.3g} nats per token (at most {self.max_kl:g} is fine)")
        self.check("repetition in the answer", f"{repeated:.0%} (full cache {usual:.0%})")
        if kl > self.max_kl:
            for cause, evidence, remedy in sorted(self._suspects(kl), key=lambda item: item[1]):
                self.found(cause, evidence, remedy=remedy)
            if not any(not item.advice for item in self.findings):
                self.found("not-explained", f"KL is {kl:.3g}; turning single settings off did not halve it")
        elif repeated > 0.5 and repeated > usual + 0.2:
            self.found("repetition", f"{repeated:.0%} of the answer repeats itself, {usual:.0%} with the full cache")
        if self.config.smoothing.is_windowed:
            self._lengths()
            self._neighbours()

    def _suspects(self, kl: float) -> Iterator[tuple[str, str, str | None]]:
        """(cause, evidence, remedy) of every setting that carries at least half of the damage."""
        cache, section = self.config.cache, self.config.smoothing

        def guilty(what: str, changes: dict[str, Any]) -> float | None:
            without = self.kl(self.again(what, changes))
            self.check(f"KL {what}", f"{without:.3g}")
            return without if without <= 0.5 * kl else None

        if section.enable and (without := guilty("without smoothing", {"smoothing": {"enable": False}})) is not None:
            yield "over-smoothing", f"KL {kl:.3g}, without smoothing {without:.3g}{self._culprits(kl)}", None
        if cache.cold == "drop" and (without := guilty("with cold pages kept", {"cache": _keep(cache)})) is not None:
            lost, kept_by = self._lost_tokens(), self._gentler(kl)
            yield "key-tokens-evicted", f"KL {kl:.3g}, with nothing dropped {without:.3g}; {lost}", kept_by
        if cache.sparse.enabled:
            without_selection = guilty("with everything attended", {"cache": {"sparse": {"enabled": False}}})
            if without_selection is not None:
                attended = self.seen.stats.attended_tokens_mean if self.seen.stats else None
                words = f"; {attended:.0f} tokens attended" if attended else ""
                yield "budget-too-small", f"KL {kl:.3g}, with everything attended {without_selection:.3g}{words}", None
        if cache.warm.codec != "none" and (without := guilty("without a codec", _NO_CODEC)) is not None:
            bits = self._already_quantised()
            evidence = f"KL {kl:.3g} with {cache.warm.codec}, without {without:.3g}"
            if bits:
                yield "double-compression", f"{evidence}; keys arrive on a grid of {bits} bits already", None
            else:
                yield "codec-too-coarse", evidence, None

    def _culprits(self, kl: float) -> str:
        """Which smoothed modules do it: each one left out in turn, by bisection over the halves that matter."""
        names = list(self.seen.smoothed)
        while len(names) > 1:
            half = names[: len(names) // 2]
            seen = self.again(f"smoothing only {len(half)} modules", {"smoothing": {"target_layers": half}})
            names = half if self.kl(seen) > 0.5 * kl else names[len(names) // 2 :]
        return f"; the module that matters most is {names[0]}" if names else ""

    def _lost_tokens(self) -> str:
        """Positions that are gone although the full history would have looked at them most."""
        assert self.seen.positions is not None
        kept = self.again("watching what would have been kept", {"cache": _keep(self.config.cache)})
        gone = self.seen.positions.tier == REMOVED
        total = int((self.seen.positions.tier >= 0).sum())
        words = f"{int(gone.sum()) / max(1, total):.0%} of all pages were dropped"
        if kept.page_mass is None or kept.page_mass.shape != gone.shape:
            return words
        mass = kept.page_mass.masked_fill(~gone, -1.0).nan_to_num(-1.0)
        best = mass.flatten(0, 1).max(0)
        page = int(best.values.argmax())
        if float(best.values[page]) <= 0:
            return words
        size = self.seen.positions.page_size
        ids = torch.cat((self.subject.prompt, self.subject.forced))[page * size : (page + 1) * size]
        text = " ".join(self.decode(ids.tolist()).split())[:60]
        threshold = float(best.values[page])
        return f'{words}; the most looked at: position {page * size} ("{text}"), mass {threshold:.3g}'

    def _gentler(self, kl: float) -> str | None:
        """What would have kept them: the policy's own setting, halved or doubled until the damage is gone."""
        cache = self.config.cache
        name, factor = {"recent": ("hot_size", 2.0), "budget": ("warm_size", 2.0)}.get(
            cache.policy, ("threshold" if cache.threshold is not None else "threshold_relative", 0.5)
        )
        value = getattr(cache, name)
        for _ in range(_HALVINGS):
            value = int(value * factor) if factor > 1 else value * factor
            if factor > 1 and value > 2 * len(self.subject.prompt):
                break
            without = self.kl(self.again(f"{name} {value:g}", {"cache": {name: value}}))
            if without <= max(self.max_kl, 0.25 * kl):
                self.check(f"{name} that keeps them", f"{value:g}: KL {without:.3g}")
                better = f"KL {without:.3g} instead of {kl:.3g}"
                return f"set {name}: {value:g} ({better}), or keep everything with cold: keep"
        return None

    def _already_quantised(self) -> int | None:
        """The bits of the grid that the model's own keys lie on, or None: is the KV compressed before we see it?"""
        return grid_bits(key_values(self.subject))

    def _lengths(self) -> None:
        """Does smoothing change short sequences otherwise? Then the mix of lengths in a batch decides quality."""
        self.tell("short against long sequences")
        short, long = kl_by_length(self.subject, self.config.smoothing, (32, 256))
        self.check("KL of smoothing by length", f"{short:.3g} on sequences of 32 tokens, {long:.3g} on 256")
        uneven = max(short, long) > max(self.max_kl, 3 * min(short, long))
        if uneven and isinstance(self.config.smoothing.window_size, int):
            evidence = f"smoothing moves sequences of 32 tokens by KL {short:.3g}, of 256 by {long:.3g}"
            self.found("window-not-relative", evidence)

    def _neighbours(self) -> None:
        """Is a request's answer the same alone and beside a longer one?"""
        ids = self.subject.prompt
        alone, beside = beside_another(self.subject, self.config, ids[: len(ids) // 2], ids)
        difference = float((alone - beside).abs().max())
        self.check("the same request in a batch", f"logits differ by {difference:.2g}")
        if difference > 0.05 * float(alone.abs().max()):
            self.found("batch-leak", f"logits of one request change by {difference:.2g} beside a longer one")

    # -- speed and memory ----------------------------------------------------------------------------------------

    def _speed(self) -> None:
        seen, plain = self.seen, self.plain
        self.check("time per token", f"{seen.step_ms:.3g} ms (plain {plain.step_ms:.3g} ms)")
        section = self.config.smoothing
        if seen.own_cost_ms > 0:
            share = seen.own_cost_ms / seen.step_ms
            self.check("smoothing's own time", f"{seen.own_cost_ms:.3g} ms per token, {share:.0%} of a step")
            if section.int8 == "off":
                words = f"smoothing takes {seen.own_cost_ms:.3g} ms per token ({share:.0%} of a step)"
                self.found("smoothing-overhead", f"{words}, and nothing is faster for it")
            self._window_cost()
        if seen.step_ms < 0.95 * plain.step_ms:
            return
        weights = weight_read_bytes(self.subject.model)
        share = plain.kv_bytes / (plain.kv_bytes + weights)
        self.check("KV's share of the bytes a step reads", f"{share:.1%}")
        length = len(self.subject.prompt)
        if share < KV_SHARE:
            evidence = (
                f"{seen.step_ms:.3g} ms per token against {plain.step_ms:.3g} ms; after {length} tokens the cache is "
                f"{share:.1%} of the bytes a step reads, so it bounds the gain to {1 / (1 - share):.2f} times"
            )
            self.found("bottleneck-elsewhere", evidence, advice=True)
        sparse = self.config.cache.sparse
        if sparse.enabled and sparse.budget_for(length) >= length:
            evidence = f"the budget of {sparse.budget_for(length)} tokens covers all {length}"
            self.found("budget-covers-everything", evidence, advice=True)

    def _window_cost(self) -> None:
        section = self.config.smoothing
        window = section.window_for(len(self.subject.prompt))
        if window <= 4:
            return
        small = self.again("the smallest window", {"smoothing": {"window_size": 4}})
        self.check("smoothing's own time with window 4", f"{small.own_cost_ms:.3g} ms per token")
        if small.own_cost_ms < 0.6 * self.seen.own_cost_ms:
            evidence = (
                f"with a window of {window} smoothing takes {self.seen.own_cost_ms:.3g} ms per token, with 4 "
                f"{small.own_cost_ms:.3g} ms"
            )
            self.found("window-too-large", evidence)

    def _memory(self) -> None:
        stats = self.seen.stats
        if stats is None or not stats.kv_bytes:
            return
        share = stats.statistics_bytes / stats.kv_bytes
        tables = (stats.bytes_by_tier["bookkeeping"] - stats.statistics_bytes) / stats.kv_bytes
        ratio = stats.kv_bytes / max(1, self.plain.kv_bytes)
        self.check("KV memory", f"{ratio:.2f} of plain transformers'")
        self.check("attention statistics", f"{share:.1%} of it (at most {STATISTICS_SHARE:.0%} is fine)")
        if share > STATISTICS_SHARE and (self.config.cache.page_size < 16 or ratio >= 0.98):
            cache = self.config.cache
            evidence = (
                f"attention statistics are {share:.1%} of the KV memory: {cache.observation_window} observations for "
                f"every {cache.page_size} tokens"
            )
            self.found("statistics-too-large", evidence)
        cache, length = self.config.cache, len(self.subject.prompt)
        if ratio < 0.98 or cache.warm.codec == "none":
            return
        if tables > BOOKKEEPING_SHARE:
            evidence = f"tables and summaries are {tables:.0%} of the KV memory at a page size of {cache.page_size}"
            self.found("tables-too-large", evidence)
        if cache.hot_size >= 0.75 * length:
            evidence = f"hot_size is {cache.hot_size} of {length} tokens; KV memory is {ratio:.2f} of plain"
            self.found("hot-zone-too-large", evidence, advice=True)


_NO_CODEC = {"cache": {"warm": {"codec": "none"}, "cold": "keep", "policy": "keep_all", "threshold": None,
                       "threshold_relative": None, "warm_size": None}}  # fmt: skip


def _keep(cache: Any) -> dict[str, Any]:
    """The same cache with nothing dropped; the policy goes on watching where it can."""
    if cache.policy == "recent":
        return {"cold": "keep", "policy": "threshold", "threshold": 0.0}
    return {"cold": "keep", "warm_size": cache.warm_size if cache.policy == "budget" else None}


def changed(config: GsmConfig, changes: dict[str, Any]) -> GsmConfig:
    """``config`` with some settings replaced, checked anew."""
    return load_config(_overlay(config.model_dump(mode="json"), changes))


def _overlay(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _overlay(merged[key], value) if both else value
    return merged
