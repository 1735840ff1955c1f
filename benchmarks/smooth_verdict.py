"""The verdict table of the numeric lever, put together from results/smooth_*.json.

    python benchmarks/smooth_verdict.py      prints it, writes results/smooth_verdict.{json,png}

Nothing is measured here: every figure comes from a file that says how it was made. A gain counts from 1.05 on, which is
more than this machine's noise, and only within the quality bar.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
WORTH, TOLERANCE = 1.05, 0.015
WINDOW = "0.1, W 8, high_kurtosis"  # the configuration that the source document recommends
METHODS = {  # row -> (quality arm, speed arm, arm of the tails)
    "int8 dynamic": ("dynamic", "dynamic", ""),
    "channel + int8 dynamic": ("dynamic + channel", "dynamic", "channel"),
    "rotate + int8 dynamic": ("dynamic + rotate", "dynamic + rotate", "rotate"),
    "rotate + int8 static, sinks exempt": ("static + rotate", "static + rotate", "rotate"),
    "int8 weight-only": ("weight_only", "weight_only", ""),
    "int8 weight-only, head in fp32": ("weight_only, head in fp32", "weight_only, head in fp32", ""),
}


def load(name: str) -> dict[str, Any]:
    """The arms of one result file; empty when that part was not run yet."""
    path = RESULTS / f"smooth_{name}.json"
    if not path.exists():
        return {}
    arms: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["arms"]
    return arms


def rows() -> list[dict[str, Any]]:
    quality, speed, tails, window, cost = (load(name) for name in ("quality", "speed", "tails", "window", "cost"))
    table = [
        _row(name, quality[arm], speed.get(timed), tails, tail)
        for name, (arm, timed, tail) in METHODS.items()
        if arm in quality
    ]
    if WINDOW in window and cost:
        own_ms = cost["W 8, bf16"]["decode_us_per_module_and_token"] * window[WINDOW]["num_modules"] / 1e3
        table.insert(0, {**_row(f"window {WINDOW}", window[WINDOW], None, tails, ""), "own_cost_ms_per_token": own_ms})
    return table


def _row(
    name: str, quality: dict[str, Any], speed: dict[str, Any] | None, tails: dict[str, Any], tail: str
) -> dict[str, Any]:
    change = quality["perplexity_change"]
    row = {
        "method": name,
        "num_tokens": quality["num_tokens"],
        "perplexity_change": change,
        "kl": quality["kl"]["mean"],
        "top1": quality["top1"],
        "short_sequences_change": quality["short_change"]["mean"],
        "median_kurtosis_before": tails["before"]["median"] if tails else None,
        "median_kurtosis_after": tails[tail]["median"] if tail in tails else None,
        "prefill_gain": None,
        "decode_gain": None,
        "products_ms_before": None,
        "products_ms_after": None,
        "own_cost_ms_per_token": 0.0,
    }
    if speed is not None:
        row |= {
            "prefill_gain": speed["prefill_gain"],
            "decode_gain": speed["decode_gain"],
            "products_ms_before": speed["products_ms_before"]["median"],
            "products_ms_after": speed["products_ms_after"]["median"],
            "own_cost_ms_per_token": speed["own_cost_ms_per_token"],
        }
    gains = [gain for gain in (row["prefill_gain"], row["decode_gain"]) if gain is not None]
    if max(gains, default=1.0) < WORTH:
        verdict = "no benefit measured here"
    else:
        verdict = "worth it here" if change["mean"] <= TOLERANCE else "too costly in quality"
    return {**row, "verdict": verdict}


def show(table: list[dict[str, Any]]) -> None:
    head = ["method", "perplexity (95 %)", "KL", "kurtosis", "products ms", "prefill", "decode", "own ms", "verdict"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for row in table:
        change = row["perplexity_change"]
        cells = [
            row["method"],
            f"{change['mean']:+.2%} ({change['low']:+.2%} to {change['high']:+.2%})",
            f"{row['kl']:.4f}",
            _pair(row["median_kurtosis_before"], row["median_kurtosis_after"]),
            _pair(row["products_ms_before"], row["products_ms_after"]),
            "-" if row["prefill_gain"] is None else f"{row['prefill_gain']:.2f}x",
            "-" if row["decode_gain"] is None else f"{row['decode_gain']:.2f}x",
            f"{row['own_cost_ms_per_token']:.2f}",
            row["verdict"],
        ]
        print("| " + " | ".join(cells) + " |")


def _pair(before: float | None, after: float | None) -> str:
    return " -> ".join(f"{value:.1f}" for value in (before, after) if value is not None) or "-"


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Loss against gain: what each method costs in perplexity and what it buys in decode speed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    names = [row["method"] for row in table][::-1]
    means = [100 * row["perplexity_change"]["mean"] for row in table][::-1]
    ends = [[100 * row["perplexity_change"][end] for row in table][::-1] for end in ("low", "high")]
    errors = [
        [m - e for m, e in zip(means, ends[0], strict=True)],
        [e - m for m, e in zip(means, ends[1], strict=True)],
    ]
    left.barh(names, means, xerr=errors, color="#b5543c")
    left.set_xlabel("change of perplexity, % (95 % interval)")
    for offset, key, colour in ((0.2, "prefill_gain", "#4a7ba6"), (-0.2, "decode_gain", "#5a9367")):
        right.barh(
            [index + offset for index in range(len(table))],
            [row[key] or 1.0 for row in table][::-1],
            0.38,
            label=key.replace("_gain", ""),
            color=colour,
        )
    right.set_yticks(range(len(table)), [""] * len(table))
    right.axvline(1.0, color="black", linewidth=0.8)
    right.set_xlabel("times faster than fp32 (1 where it changes nothing)")
    right.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    table = rows()
    if not table:
        raise SystemExit("no results/smooth_quality.json: run `python benchmarks/smooth.py quality` first")
    show(table)
    content = {"command": "python benchmarks/smooth_verdict.py", "sources": "results/smooth_*.json", "rows": table}
    (RESULTS / "smooth_verdict.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draw(table, RESULTS / "smooth_verdict.png")


if __name__ == "__main__":
    main()
