"""Rules over result files: what a finished measurement says about the trouble, without running anything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gsm.measure.diagnose.record import Checked, DiagnoseResult, Finding, finding
from gsm.measure.diagnose.signals import repeated_share
from gsm.results import Tolerance
from gsm.results.kinds import ResultFile, read_result_files

MAX_KL, MAX_LOST = Tolerance().kl, Tolerance().needles_lost
KV_SHARE, STATISTICS_SHARE = 0.2, 0.01
PLAIN, LINEAR = "transformers", "linear"


def diagnose_files(paths: Iterable[str | Path]) -> DiagnoseResult:
    """Findings from result files of any kind. Raises InputError for a file that is no result."""
    results = read_result_files(paths)
    findings: list[Finding] = []
    checked = []
    for result in results:
        rules = _RULES.get(result.kind)
        own = list(rules(result.data)) if rules else []
        findings += [item.model_copy(update={"evidence": f"{result.name}: {item.evidence}"}) for item in own]
        what = f"{len(own)} findings" if rules else "nothing to diagnose in a result of this kind"
        checked.append(Checked(what=f"{result.name} ({result.kind})", found=what))
    findings += _flat_throughput(results)
    findings.sort(key=lambda item: item.advice)
    return DiagnoseResult(
        sources=tuple(result.name for result in results), findings=tuple(findings), checked=tuple(checked)
    )


def _bench(data: dict[str, Any]) -> Iterator[Finding]:
    if (data.get("environment") or {}).get("noisy"):
        yield finding("noisy-measurement", "others used more than a tenth of the machine meanwhile", advice=True)
    arms = {arm["name"]: arm for arm in data["arms"]}
    plain = arms.get(PLAIN)
    usual = arms.get(LINEAR, plain)  # the same linear layers, so that the difference is the cache's
    tokens = data["workload"]["prompt_tokens"]
    for name, arm in arms.items():
        if name in (PLAIN, LINEAR):
            continue
        if plain is not None and usual is not None:
            yield from _no_gain(name, arm, usual, tokens)
            yield from _more_memory(name, arm, plain, tokens)
        yield from _quality(name, arm.get("config"), arm.get("quality"))


def _no_gain(name: str, arm: dict[str, Any], plain: dict[str, Any], tokens: int) -> Iterator[Finding]:
    before, after, bound = plain["tpot_ms"]["median"], arm["tpot_ms"]["median"], plain.get("bound")
    if not before or not after or after < 0.95 * before:
        return
    words = f"{name} takes {after:.3g} ms per token after {tokens} tokens, {plain['name']} {before:.3g} ms"
    profile = arm.get("profile") or plain.get("profile")
    if profile:
        part, ms = max(profile["parts_ms"].items(), key=lambda item: item[1])
        words += f"; most of a step goes to {part.replace('_', ' ')} ({ms:.3g} ms)"
        if part == "smoothing":
            yield finding("smoothing-overhead", words)
            return
    share = bound["kv_read_bytes"] / (bound["kv_read_bytes"] + bound["weight_bytes"]) if bound else None
    if share is not None and share < KV_SHARE:
        yield finding("bottleneck-elsewhere", f"{words}; the cache is {share:.1%} of the bytes a step reads", True)
    elif profile:
        yield finding("bottleneck-elsewhere", words, True)


def _more_memory(name: str, arm: dict[str, Any], plain: dict[str, Any], tokens: int) -> Iterator[Finding]:
    own, usual = arm.get("kv_bytes"), plain.get("kv_bytes")
    tiers = arm.get("bytes_by_tier") or {}
    if own and usual and own > 1.05 * usual and tiers:
        part = max((key for key in tiers if key != "hot"), key=lambda key: tiers[key])
        words = f"{name} holds {own / usual:.2f} times plain transformers' KV bytes, {tiers[part] / own:.0%} in {part}"
        yield finding("tables-too-large" if part == "bookkeeping" else "hot-zone-too-large", words)
    peak, usual_peak = arm.get("peak_rss_bytes"), plain.get("peak_rss_bytes")
    if peak and usual_peak and peak > 1.2 * usual_peak:
        words = (
            f"{name} needs {peak / 2**20:.0f} MiB at its peak after {tokens} tokens, plain {usual_peak / 2**20:.0f} MiB"
        )
        yield finding("working-memory", words, True)


def _quality(name: str, config: dict[str, Any] | None, quality: dict[str, Any] | None) -> Iterator[Finding]:
    """A miss, and the setting in the config that is the likeliest cause."""
    if not quality or not config:
        return
    ends, pairs = quality.get("kl_ci95"), [quality.get("prefill_pair"), quality.get("late_pair")]
    lost = sum(pair["lost"] for pair in pairs if pair)
    too_many = any(pair["lost"] > MAX_LOST for pair in pairs if pair)
    if (not ends or ends[1] <= MAX_KL) and not too_many:
        return
    words = f"{name}: KL up to {ends[1]:.3g}, {lost} needles lost" if ends else f"{name}: {lost} needles lost"
    cache = config["cache"]
    smoothing = config.get("smoothing") or {}
    if cache.get("cold") == "drop":
        yield finding("key-tokens-evicted", words)
    elif smoothing.get("enable"):
        yield finding("over-smoothing", words)
    elif (cache.get("sparse") or {}).get("enabled"):
        yield finding("budget-too-small", words)
    elif "int4" in ((cache.get("warm") or {}).get("codec"), cache.get("cold")):
        yield finding("codec-too-coarse", words)
    else:
        yield finding("not-explained", words)


def _eval(data: dict[str, Any]) -> Iterator[Finding]:
    if not data["passed"]:
        yield from _quality("the config", data.get("config"), data["quality"])


def _smooth(data: dict[str, Any]) -> Iterator[Finding]:
    outcome, speed = data.get("outcome"), data.get("speed")
    if outcome:
        verdict = outcome["verdict"]
        config = outcome["config"]
        if not verdict["finite"]:
            yield finding("smoothing-precision", f"the output is not finite with precision {config['precision']}")
        elif not outcome["accepted"] or outcome.get("culprits"):
            named = ", ".join(outcome.get("culprits") or outcome.get("rolled_back") or ()) or "no single module"
            yield finding("over-smoothing", f"the guard rolled back: {named}", bool(outcome["accepted"]))
        long, short = verdict.get("perplexity_change"), verdict.get("short_change")
        if long and short and abs(short["mean"] - long["mean"]) > max(0.02, 0.5 * abs(long["mean"])):
            words = f"perplexity changes by {long['mean']:+.1%} on long sequences, {short['mean']:+.1%} on short ones"
            yield finding("window-not-relative", words, not isinstance(config.get("window_size"), int))
    if speed and speed["own_cost_ms_per_token"] > 0:
        before, after = speed["decode_ms_before"]["median"], speed["decode_ms_after"]["median"]
        if before and after and after >= 0.98 * before:
            cost = speed["own_cost_ms_per_token"]
            words = f"smoothing takes {cost:.3g} ms per token; a step went from {before:.3g} to {after:.3g} ms"
            yield finding("smoothing-overhead", words)


def _explain(data: dict[str, Any]) -> Iterator[Finding]:
    stats = data["stats"]
    if broken := stats.get("nonfinite_pages"):
        yield finding("codec-overflow", f"pages with inf or NaN in layers {', '.join(broken)}")
    held = stats.get("kv_bytes") or 0
    if held and stats.get("statistics_bytes", 0) / held > STATISTICS_SHARE:
        yield finding(
            "statistics-too-large", f"attention statistics are {stats['statistics_bytes'] / held:.1%} of the KV memory"
        )
    removed = data["positions"]["share_by_tier"].get("removed", 0.0)
    if removed > 0.5:
        yield finding("key-tokens-evicted", f"{removed:.0%} of all tokens were removed for good", True)


def _generate(data: dict[str, Any]) -> Iterator[Finding]:
    share = repeated_share(data["text"].split())
    if share > 0.5:
        dropped = ((data.get("config") or {}).get("cache") or {}).get("cold") == "drop"
        yield finding("key-tokens-evicted" if dropped else "repetition", f"{share:.0%} of the answer's words repeat")


def _load(data: dict[str, Any]) -> Iterator[Finding]:
    arms = [data[name] for name in "AB" if name in data] or [data]
    for arm in arms:
        if arm.get("failed"):
            yield finding("requests-failed", f"{arm['failed']} of {arm['failed'] + arm['completed']} requests failed")


def _flat_throughput(results: list[ResultFile]) -> list[Finding]:
    """Load tests of one server at several concurrencies: does more traffic bring more tokens?"""
    loads = [r.data for r in results if r.kind == "load" and r.data["kind"] == "load" and r.data.get("max_concurrency")]
    loads.sort(key=lambda data: data["max_concurrency"])
    found = []
    for low, high in itertools.pairwise(loads):
        few, many = low["max_concurrency"], high["max_concurrency"]
        if many >= 2 * few and high["output_throughput"] < 1.1 * low["output_throughput"]:
            rates = (
                f"{low['output_throughput']:.3g} tokens/s at {few} requests in flight, {high['output_throughput']:.3g}"
            )
            words = f"{rates} at {many}: the server is saturated"
            found.append(finding("bottleneck-elsewhere", words, True))
    return found


_RULES: dict[str, Callable[[dict[str, Any]], Iterator[Finding]]] = {
    "bench": _bench,
    "eval": _eval,
    "smooth": _smooth,
    "explain": _explain,
    "generate": _generate,
    "load": _load,
}
