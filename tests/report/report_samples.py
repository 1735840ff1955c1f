"""One small result of every kind, with the shapes that the commands write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gsm.results as results
from gsm.measure.diagnose.record import DiagnoseResult
from gsm.measure.probe.record import Growth, Lever, ProbeResult, Shares
from gsm.measure.probe.record import Verdict as ProbeVerdict
from gsm.results import Spread
from gsm.results.records import Profile

COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
Save = Callable[[str, Any], Path]


def saver(directory: Path) -> Save:
    """Write a record or plain data as a result file in ``directory``."""

    def write(name: str, content: Any) -> Path:
        path = directory / name
        data = content if isinstance(content, dict | list) else content.model_dump(mode="json")
        path.write_text(json.dumps(data), encoding="utf-8")
        return path

    return write


def environment(**known: Any) -> results.Environment:
    return results.collect_environment(model="tiny", dtype="float32", threads=1, **known)


def workload(tokens: int = 512) -> results.Workload:
    return results.Workload(prompt_tokens=tokens, new_tokens=8, runs=2, batch_size=1)


def bench(tokens: int = 512, plain_ms: float = 10.0, sparse_ms: float = 6.0, kl: float = 0.004) -> results.BenchResult:
    def arm(name: str, ms: float, kl: float, config: dict[str, Any] | None) -> results.ArmResult:
        return results.ArmResult(
            name=name,
            config=config,
            ttft_ms=Spread(median=100, min=95, max=110),
            tpot_ms=Spread(median=ms, min=ms * 0.99, max=ms * 1.01),
            kv_bytes=2_000_000 if config is None else 900_000,
            attended_tokens_mean=500.0 if kl < 0.001 else 128.0,
            bytes_by_tier=None
            if config is None
            else {"hot": 300_000, "warm": 550_000, "cold": 0, "bookkeeping": 50_000},
            quality=results.Quality(kl=kl, kl_ci95=(kl / 2, kl * 2), top1_agreement=0.99, n_windows=16),
        )

    arms = (
        arm("transformers", plain_ms, 0.0, None),
        arm("tiers", plain_ms * 0.9, 1e-5, {"cache": {"cold": "keep"}}),
        arm("sparse", sparse_ms, kl, {"cache": {"cold": "keep"}}),
    )
    return results.BenchResult(environment=environment(), workload=workload(tokens), arms=arms)


def probe() -> ProbeResult:
    parts = dict.fromkeys(("selection", "mass", "cache_writes", "smoothing", "other"), 0.1)
    parts |= {"linear": 5.0, "attention": 2.2, "host": 1.0}
    return ProbeResult(
        environment=environment(),
        workload=workload(),
        ttft_ms=100.0,
        context_tokens=tuple(range(512, 640)),
        token_ms=tuple(8 + 0.005 * n for n in range(128)),
        growth=Growth(us_per_token=5.0, low=4.0, high=6.0, intercept_ms=5.4),
        profile=Profile(
            context_tokens=512, num_steps=32, step_ms=Spread(median=8.7, min=8, max=9), parts_ms=parts,
            host_parts_ms={"python": 1.0}, sum_ms=8.7, sum_error=0.0, other_share=0.02, explains_step=True,
        ),
        shares=Shares(prefill=0.1, weights=0.5, kv=0.25, overhead=0.15),
        verdict=ProbeVerdict(kind="weights", because="half of a step reads weights"),
        levers=(Lever(name="sparse", context_tokens=512, how="bytes", plain_ms=8.7, predicted_ms=8.0,
                      predicted_gain=1.09),),
    )  # fmt: skip


def calibration() -> dict[str, Any]:
    def site(block: int, kind: str, kurtosis: float) -> dict[str, Any]:
        return {
            "name": f"model.layers.{block}.{kind}", "place": "input", "kind": kind, "block": block, "num_tokens": 99,
            "max": 9.0, "max_body": 8.0, "mean": 0.0, "variance": 1.0, "variance_body": 1.0, "kurtosis": kurtosis * 2,
            "kurtosis_body": kurtosis, "sink_share": 0.1, "top_channel": 3, "top_channel_share": 0.2,
            "channel_max": [1.0], "channel_max_body": [1.0], "sensitivity": None,
        }  # fmt: skip

    sites = [site(block, kind, 3.0 + block) for block in range(4) for kind in ("mlp_norm", "mlp_out_input")]
    return {"format": "gsm-calibration-1", "model": "tiny", "text": "x", "num_samples": 4, "sample_tokens": 32,
            "num_sink_tokens": 1, "sites": sites}  # fmt: skip


def explained() -> dict[str, Any]:
    pages = 32
    streams = {"hot": [6] + [0] * 23 + [6] * 8, "warm": [0] + [5] * 23 + [0] * 8, "cold": [0] * pages,
               "removed": [0] + [1] * 23 + [0] * 8}  # fmt: skip
    return {
        "environment": environment().model_dump(mode="json"),
        "config": {},
        "positions": {"num_tokens": 512, "page_size": 16, "num_streams": 6, "streams_by_page": streams,
                      "share_by_tier": {"hot": 0.3, "warm": 0.58, "cold": 0.0, "removed": 0.12},
                      "removals": [{"reason": "threshold", "at_num_tokens": 300, "num_tokens": 368}]},
        "token": None,
        "stats": {"kv_bytes": 1000, "statistics_bytes": 5, "nonfinite_pages": {},
                  "bytes_by_tier": {"hot": 500, "warm": 450, "bookkeeping": 50}},
    }  # fmt: skip


def evaluation(passed: bool = True) -> results.EvalResult:
    return results.EvalResult(
        environment=environment(),
        workload=workload(),
        config={"cache": {"cold": "keep", "sparse": {"enabled": True}}},
        tolerance=results.Tolerance(kl=0.01, needles_lost=1),
        quality=results.Quality(kl=0.02, kl_ci95=(0.01, 0.03), n_windows=16),
        passed=passed,
        failures=() if passed else ("KL may be 0.03 nats per token",),
    )


def everything(save: Save) -> list[Path]:
    """Files of every kind that can be made without running a model."""
    from gsm.measure.diagnose.record import Checked, finding

    diagnosis = DiagnoseResult(
        environment=environment(),
        findings=(finding("key-tokens-evicted", "half of all pages were dropped"),),
        checked=(Checked(what="values", found="finite"),),
    )
    return [
        save("bench-512.json", bench()),
        save("bench-1024.json", bench(1024, 14.0, 6.5)),
        save("probe.json", probe()),
        save("calibration.json", calibration()),
        save("explain.json", explained()),
        save("eval.json", evaluation(passed=False)),
        save("diagnose.json", diagnosis),
    ]
