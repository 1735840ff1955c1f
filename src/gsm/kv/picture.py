"""A picture of where a sequence's tokens are: one row per layer and kv head, one column per page."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from gsm.errors import InputError
from gsm.kv.positions import TIERS, PositionMap

_COLOURS = ("#d95f02", "#7570b3", "#80b1d3", "#eeeeee")  # hot, warm, cold, removed


def draw_positions(positions: PositionMap, path: str | Path, title: str = "") -> None:
    """Write the tier map as PNG (or what ``path`` ends with), with the share of heads that still hold each position.

    Raises InputError when matplotlib is missing, the sequence is empty or the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch
    except ImportError:
        raise InputError("the picture needs matplotlib; install gsm-infer[plots], or leave --picture out") from None
    if positions.num_tokens == 0:
        raise InputError("there is nothing to draw: the sequence has no tokens; feed a prompt first")
    tiers = positions.tier.flatten(0, 1)
    tiers = tiers[(tiers >= 0).all(-1)]
    extent = (0, tiers.shape[1] * positions.page_size, len(tiers), 0)
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(11, 6.5), sharex=True, height_ratios=(4, 1), constrained_layout=True
    )
    top.imshow(
        tiers.numpy(), aspect="auto", interpolation="nearest", extent=extent,
        cmap=ListedColormap(_COLOURS), vmin=0, vmax=len(TIERS) - 1,
    )  # fmt: skip
    top.set_ylabel("layer x kv head")
    top.set_title(title or f"{positions.num_tokens} tokens")
    shares = positions.shares()
    labels = [
        Patch(color=colour, label=f"{name} {shares[name]:.0%}") for name, colour in zip(TIERS, _COLOURS, strict=True)
    ]
    figure.legend(handles=labels, loc="outside lower center", ncols=len(TIERS), frameon=False)
    tiers = torch.cat((tiers, tiers[:, -1:]), dim=1)  # the last step needs an end
    position = torch.arange(tiers.shape[1]) * positions.page_size
    bottom.stackplot(
        position.numpy(), *[(tiers == index).float().mean(0).numpy() for index in range(len(TIERS))], colors=_COLOURS,
        step="post",
    )  # fmt: skip
    bottom.set_ylim(0, 1)
    bottom.set_ylabel("share of heads")
    bottom.set_xlabel("position in tokens")
    target = Path(path)
    unfinished = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix or '.png'}")
    try:
        figure.savefig(unfinished, dpi=120)
        os.replace(unfinished, target)
    except (OSError, ValueError) as error:
        unfinished.unlink(missing_ok=True)
        raise InputError(f"the picture cannot be written to {target}: {error}") from None
    finally:
        pyplot.close(figure)
