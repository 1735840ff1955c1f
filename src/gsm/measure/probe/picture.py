"""Time per token against length, as a picture and as a line of text."""

from __future__ import annotations

import os
from pathlib import Path

from gsm.errors import InputError
from gsm.measure.probe.record import ProbeResult
from gsm.stats import summary

_BARS = "▁▂▃▄▅▆▇█"


def draw(result: ProbeResult, path: str | Path) -> None:
    """Write a picture (PNG, SVG or PDF by its ending). Raises InputError without matplotlib or for a bad path."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs the package matplotlib; pip install 'gsm-infer[plots]'") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(result.context_tokens, result.token_ms, ".", markersize=2, color="#7aa6c2", label="one token")
    if result.growth is not None and result.context_tokens:
        ends = [result.context_tokens[0], result.context_tokens[-1]]
        slope = result.growth
        label = f"{slope.us_per_token:.2f} us per token of context ({slope.low:.2f} to {slope.high:.2f})"
        axes.plot(ends, [slope.at(x) for x in ends], color="#b03a2e", label=label)
    for lever in result.levers:
        axes.plot(lever.context_tokens, lever.measured_ms or lever.predicted_ms, "x", color="#555555")
        axes.annotate(lever.name, (lever.context_tokens, lever.measured_ms or lever.predicted_ms), fontsize=7)
    top = max(summary(result.token_ms)["median"] or 0.0, *(lever.plain_ms for lever in result.levers), 0.0)
    axes.set_ylim(0, 1.3 * top or None)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("milliseconds per token")
    axes.set_title(
        f"{result.environment.model}, {result.environment.dtype}: {result.verdict.sentence}", fontsize=8, wrap=True
    )
    axes.legend(fontsize=8, loc="lower right")
    _save(figure, Path(path))


def _save(figure: object, path: Path) -> None:
    """Through a temporary name: an interrupted picture must not look like one."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix or '.png'}")
    try:
        figure.savefig(temporary, dpi=150)  # type: ignore[attr-defined]
        os.replace(temporary, path)
    except (OSError, ValueError) as error:
        raise InputError(f"the picture {path} cannot be written: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def sparkline(values: tuple[float, ...], width: int = 60) -> str:
    """One character for each stretch of ``values``, its median between 0 and the largest; empty without values."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    medians = [summary(values[i : i + size])["median"] or 0.0 for i in range(0, len(values), size)]
    top = max(medians) or 1.0
    return "".join(_BARS[min(7, int(8 * value / top))] for value in medians)
