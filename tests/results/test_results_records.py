from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from gsm.cli.tables import arm_rows, quality_rows
from gsm.errors import InputError
from gsm.results import (
    ArmResult,
    BenchResult,
    Quality,
    Samples,
    Spread,
    Workload,
    check_writable,
    collect_environment,
    read_result,
    write_result,
)


def small_bench(**arm) -> BenchResult:
    return BenchResult(
        environment=collect_environment(model="m", dtype="float32", threads=2),
        workload=Workload(prompt_tokens=10, new_tokens=2, runs=1, batch_size=1),
        arms=(ArmResult(name="transformers", config=None, **arm),),
    )


def test_round_trip(tmp_path: Path) -> None:
    quality = Quality(kl=0.1, kl_ci95=(0.05, 0.2), n_windows=16)
    result = small_bench(ttft_ms=Spread(median=2, min=1, max=3), samples=Samples(ttft_ms=(1, 2, 3)), quality=quality)
    write_result(tmp_path / "r.json", result)
    assert read_result(tmp_path / "r.json", BenchResult) == result
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_the_frozen_shape_is_kept(tmp_path: Path) -> None:
    write_result(tmp_path / "r.json", small_bench(quality=Quality()))
    content = json.loads((tmp_path / "r.json").read_text())
    assert {"environment", "workload", "arms"} <= content.keys()
    assert {"prompt_tokens", "new_tokens", "runs", "batch_size"} <= content["workload"].keys()
    (arm,) = content["arms"]
    assert {
        "name", "config", "ttft_ms", "tpot_ms", "kv_bytes", "kv_pool_bytes", "peak_rss_bytes", "peak_device_bytes",
        "attended_tokens_mean", "quality",
    } <= arm.keys()  # fmt: skip
    assert arm["ttft_ms"].keys() == arm["tpot_ms"].keys() == {"median", "min", "max"}
    assert {
        "nll_delta", "kl", "kl_ci95", "top1_agreement", "needle_prefill", "needle_late", "n_windows", "n_needles",
    } <= arm["quality"].keys()  # fmt: skip


def test_what_was_not_measured_is_null_in_the_file_and_na_on_the_terminal(tmp_path: Path) -> None:
    result = small_bench(quality=Quality())
    write_result(tmp_path / "r.json", result)
    arm = json.loads((tmp_path / "r.json").read_text())["arms"][0]
    assert arm["ttft_ms"] == {"median": None, "min": None, "max": None}
    assert all(arm[name] is None for name in ("kv_bytes", "peak_rss_bytes", "attended_tokens_mean"))
    assert all(arm["quality"][name] is None for name in ("nll_delta", "kl", "kl_ci95", "needle_late"))
    rows = arm_rows(result.arms) + quality_rows([result.arms[0].quality, None])
    assert {cell for row in rows for cell in row[1:]} == {"n/a"}


def test_not_a_number_is_refused() -> None:
    with pytest.raises(ValidationError):
        Quality(kl=float("nan"))


def test_records_are_frozen_and_know_their_fields() -> None:
    with pytest.raises(ValidationError):
        Quality().kl = 1.0  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Quality(kll=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        ("{", "is no BenchResult"),
        ("[]", "is no BenchResult"),
        ('{"environment": {}}', "is no BenchResult: environment.python: field required"),
        ("\udc80", "cannot be read"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=said) as caught:
        read_result(path, BenchResult)
    assert "\n" not in str(caught.value)


def test_an_unknown_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_result(path, small_bench())
    content = json.loads(path.read_text())
    content["workload"]["prompt_token"] = 5
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"workload\.prompt_token"):
        read_result(path, BenchResult)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")

    def no_space(self: Path, *args: object, **kwargs: object) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_space)
    with pytest.raises(InputError, match="No space left on device"):
        write_result(path, small_bench())
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_place_that_cannot_be_written_is_noticed_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; create"):
        check_writable(tmp_path / "missing" / "r.json")
    with pytest.raises(InputError, match="is a folder"):
        check_writable(tmp_path)
    check_writable(tmp_path / "r.json")


def test_the_environment_names_what_matters() -> None:
    environment = collect_environment()
    assert environment.cores >= 1
    assert environment.memory_bytes > 2**20
    assert environment.torch
    assert environment.transformers
    assert environment.noisy is None
