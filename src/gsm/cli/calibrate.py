"""`gsm calibrate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gsm.cli.common import check_json_path, json_option, model_options, progress_bar
from gsm.cli.tables import print_table

if TYPE_CHECKING:
    from gsm.smoothing import Calibration


@click.command()
@model_options
@click.option("--text", metavar="FILE", help="UTF-8 text; Python's help topics by default. Its first third is used.")
@click.option("--samples", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--sample-tokens", type=click.IntRange(min=2), default=256, show_default=True)
@click.option("--sink-tokens", type=click.IntRange(min=0), default=1, show_default=True, help="Kept apart per sample.")
@click.option("--gradients", is_flag=True, help="Also one backward pass over at most 64 samples: sensitivity per site.")
@click.option("--picture", metavar="FILE", help="Draw kurtosis and largest values per block (PNG).")
@json_option
def command(
    model: str,
    dtype: str,
    threads: int | None,
    device: str,
    text: str | None,
    samples: int,
    sample_tokens: int,
    sink_tokens: int,
    gradients: bool,
    picture: str | None,
    json_path: str | None,
) -> None:
    """Find where MODEL's activations have heavy tails, on real text, in one streaming pass."""
    from gsm.models import load_model
    from gsm.quality.texts import encode, load_thirds
    from gsm.smoothing import calibrate, cut_samples
    from gsm.smoothing.picture import draw_calibration

    for path in (json_path, picture):
        check_json_path(path)
    thirds = load_thirds(text)
    loaded = load_model(model, dtype=dtype, threads=threads, device=device)
    rows = cut_samples(encode(loaded.tokenizer, thirds.calibration), samples, sample_tokens)
    if len(rows) < samples:
        click.echo(f"Note: the text holds {len(rows)} samples of {sample_tokens} tokens, not {samples}.", err=True)
    with progress_bar() as progress:
        calibration = calibrate(
            loaded.model,
            rows,
            gradients=gradients,
            num_sink_tokens=sink_tokens,
            name=loaded.name,
            progress=lambda phase, done, total: progress(f"calibration: {phase}", done, total),
        )
    print_calibration(calibration)
    if picture is not None:
        draw_calibration(calibration, picture)
        click.echo(f"written: {picture}", err=True)
    if json_path is not None:
        calibration.save(json_path)
        click.echo(f"written: {json_path}", err=True)


def print_calibration(calibration: Calibration, most: int = 12) -> None:
    """The sites with the heaviest tails."""
    sites = sorted(calibration, key=lambda site: site.kurtosis, reverse=True)[:most]
    rows = [
        [
            f"{site.name}:{site.place}",
            f"{site.max:.3g}",
            f"{site.variance:.3g}",
            f"{site.kurtosis:.3g}",
            f"{site.kurtosis_body:.3g}",
            f"{site.sink_share:.0%}",
            f"{site.top_channel} ({site.top_channel_share:.0%})",
            "n/a" if site.sensitivity is None else f"{site.sensitivity:.2g}",
        ]
        for site in sites
    ]
    header = ["site", "max", "variance", "kurtosis", "without sink", "sink share", "top channel", "sensitivity"]
    tokens = calibration.num_samples * calibration.sample_tokens
    print_table(
        f"Heaviest tails of {len(calibration.sites)} sites, {tokens} tokens of {calibration.model}", header, rows
    )
    driven = sum(site.sink_driven for site in calibration)
    click.echo(f"{driven} sites are sink-driven: their tail belongs to the first token, not to the text.")
