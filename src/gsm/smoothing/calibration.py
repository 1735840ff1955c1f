"""What calibration found, as plain data: one record per site, a JSON file, and the text it was taken on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gsm.errors import InputError
from gsm.smoothing.moments import Moments
from gsm.smoothing.observe import MAX_GRADIENT_SAMPLES, SiteMoments, observe, observe_gradients

FORMAT = "gsm-calibration-1"


@dataclass(frozen=True)
class SiteStats:
    """Statistics of one site. ``*_body`` leave out the first tokens of every sample (attention sinks).

    Kurtosis is excess kurtosis (0 for a normal distribution). Shares are shares of the sum of squares.
    """

    name: str
    place: str
    kind: str
    block: int
    num_tokens: int
    max: float
    max_body: float
    mean: float
    variance: float
    variance_body: float
    kurtosis: float
    kurtosis_body: float
    sink_share: float
    top_channel: int
    top_channel_share: float
    channel_max: tuple[float, ...]
    channel_max_body: tuple[float, ...]
    gradient_max: float | None = None
    gradient_variance: float | None = None
    gradient_kurtosis: float | None = None
    sensitivity: float | None = None

    @property
    def key(self) -> str:
        return f"{self.name}:{self.place}"

    @property
    def sink_driven(self) -> bool:
        """Whether the heavy tail belongs to the first tokens: most of the energy is theirs, or most of the kurtosis."""
        return self.sink_share > 0.5 or self.kurtosis > 10 * max(self.kurtosis_body, 3.0)

    @staticmethod
    def of(record: SiteMoments) -> SiteStats:
        total, body = record.total(), record.body
        mean, variance, kurtosis = total.pooled()
        _, variance_body, kurtosis_body = body.pooled()
        squares = total.sum_of_squares()
        energy = max(float(squares.sum()), 1e-300)
        return SiteStats(
            name=record.name,
            place=record.place,
            kind=record.kind,
            block=record.block,
            num_tokens=total.count,
            max=float(total.absmax.max()),
            max_body=float(body.absmax.max()),
            mean=mean,
            variance=variance,
            variance_body=variance_body,
            kurtosis=kurtosis,
            kurtosis_body=kurtosis_body,
            sink_share=float(record.sink.sum_of_squares().sum()) / energy,
            top_channel=int(squares.argmax()),
            top_channel_share=float(squares.max()) / energy,
            channel_max=tuple(total.absmax.tolist()),
            channel_max_body=tuple(body.absmax.tolist()),
            sensitivity=record.sensitivity,
            **_gradient_fields(record.gradient),
        )


@dataclass(frozen=True)
class Calibration:
    """All sites of a model, in the order of the forward pass, and what they were measured on."""

    model: str
    text: str
    num_samples: int
    sample_tokens: int
    num_sink_tokens: int
    sites: dict[str, SiteStats]

    def __iter__(self) -> Iterator[SiteStats]:
        return iter(self.sites.values())

    @property
    def has_gradients(self) -> bool:
        return any(site.sensitivity is not None for site in self)

    def of_kind(self, *kinds: str) -> list[SiteStats]:
        return [site for site in self if site.kind in kinds]

    def require_model(self, model: nn.Module) -> None:
        """Raise InputError unless ``model`` has the norms that were seen, as wide as they were."""
        norms = self.of_kind("attn_norm", "mlp_norm")
        try:
            widths = [model.get_submodule(site.name).get_parameter("weight").numel() for site in norms]
            fits = widths == [len(site.channel_max) for site in norms]
        except AttributeError:
            fits = False
        if not fits:
            raise InputError(
                f"this calibration was made on another model ({self.model or 'unnamed'}); make one with `gsm calibrate`"
            )

    def to_json(self) -> dict[str, Any]:
        head = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sites"}
        return {"format": FORMAT, **head, "sites": [asdict(site) for site in self]}

    def save(self, path: str | Path) -> None:
        """Write JSON to ``path``, complete or not at all."""
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            partial.write_text(json.dumps(self.to_json(), allow_nan=False), encoding="utf-8")
            os.replace(partial, target)
        except OSError as error:
            raise InputError(f"calibration cannot be written to {target}: {error.strerror}") from None
        finally:
            partial.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Read what `save` wrote; raises InputError."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
                raise InputError(f"{path} is no calibration file of this version; make one with `gsm calibrate`")
            sites = [_read_site(site) for site in raw["sites"]]
            return Calibration(**{**raw, "sites": {site.key: site for site in sites}})
        except OSError as error:
            raise InputError(f"calibration file {path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"calibration file {path} is damaged ({error}); make it again") from None


def calibrate(
    model: nn.Module,
    samples: Tensor,
    *,
    gradients: bool = False,
    num_sink_tokens: int = 1,
    name: str = "",
    progress: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Run ``samples`` [num_samples, tokens] int64 through ``model`` and describe every site; the model is unchanged.

    ``gradients`` adds one backward pass over at most 64 of the samples. ``progress(phase, done, total)`` is called.
    """

    def tell(phase: str) -> Callable[[int, int], None]:
        return lambda done, total: progress(phase, done, total) if progress else None

    records = observe(model, samples, num_sink_tokens=num_sink_tokens, progress=tell("activations"))
    if gradients:
        observe_gradients(model, samples[:MAX_GRADIENT_SAMPLES], records, progress=tell("gradients"))
    return Calibration(
        model=name,
        text=hashlib.sha256(samples.cpu().numpy().tobytes()).hexdigest()[:16],
        num_samples=samples.shape[0],
        sample_tokens=samples.shape[1],
        num_sink_tokens=num_sink_tokens,
        sites={key: SiteStats.of(record) for key, record in records.items()},
    )


def cut_samples(ids: Tensor, num_samples: int, sample_tokens: int) -> Tensor:
    """``ids`` [num_tokens] cut into at most ``num_samples`` rows of ``sample_tokens``, spread evenly over the text.

    Raises InputError when the text is shorter than one sample.
    """
    whole = ids.numel() // sample_tokens
    if whole == 0:
        raise InputError(
            f"the text has {ids.numel()} tokens, less than one sample of {sample_tokens}; give a longer text or a "
            "smaller --sample-tokens"
        )
    rows = ids[: whole * sample_tokens].view(whole, sample_tokens)
    picks = torch.linspace(0, whole - 1, min(num_samples, whole)).long()
    return rows[picks]


def _read_site(raw: dict[str, Any]) -> SiteStats:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
    return SiteStats(**values)


def _gradient_fields(gradient: Moments | None) -> dict[str, Any]:
    if gradient is None:
        return {}
    _, variance, kurtosis = gradient.pooled()
    return {
        "gradient_max": float(gradient.absmax.max()),
        "gradient_variance": variance,
        "gradient_kurtosis": kurtosis,
    }
