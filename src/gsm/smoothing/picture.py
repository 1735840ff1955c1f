"""A picture of a calibration: kurtosis and largest value per block and kind of site."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gsm.errors import InputError
from gsm.results.kinds import SITE_NAMES
from gsm.smoothing.calibration import Calibration, SiteStats


def draw_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a PNG (or what ``path`` ends with); raises InputError when matplotlib is missing or the file impossible."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InputError("the picture needs matplotlib; install gsm-infer[plots], or leave --picture out") from None
    figure, axes = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True)
    try:
        _lines(axes[0], calibration, "excess kurtosis", lambda site: site.kurtosis, lambda site: site.kurtosis_body)
        _lines(axes[1], calibration, "largest absolute value", lambda site: site.max, lambda site: site.max_body)
        axes[0].legend(fontsize=7, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
        axes[1].set_xlabel("block (dashed: with the first token of each sample)")
        figure.suptitle(f"{calibration.model}: {calibration.num_samples} samples of {calibration.sample_tokens} tokens")
        _save(figure, Path(path))
    finally:
        pyplot.close(figure)


def _lines(axis: Any, calibration: Calibration, label: str, total: Any, body: Any) -> None:
    for index, (kind, name) in enumerate(SITE_NAMES.items()):
        sites: list[SiteStats] = calibration.of_kind(kind)
        if not sites:
            continue
        blocks = [site.block for site in sites]
        axis.plot(blocks, [max(body(site), 1e-2) for site in sites], color=f"C{index}", label=name)
        axis.plot(blocks, [max(total(site), 1e-2) for site in sites], color=f"C{index}", linestyle=":", linewidth=1)
    axis.set_yscale("log")
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)


def _save(figure: Any, target: Path) -> None:
    partial = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix or '.png'}")
    try:
        figure.savefig(partial, dpi=120)
        os.replace(partial, target)
    except (OSError, ValueError) as error:
        raise InputError(f"the picture cannot be written to {target}: {error}") from None
    finally:
        partial.unlink(missing_ok=True)
