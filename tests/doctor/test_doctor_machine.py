"""Software and devices: every problem is found on a machine that has it, and comes with a remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gsm.measure.doctor.devices import Gpu, Machine, check_devices, cpu_features, this_machine
from gsm.measure.doctor.record import Check
from gsm.measure.doctor.software import at_least, check_software, import_error
from gsm.models.memory import container_limit

GOOD = {"torch": "2.13.0+cpu", "transformers": "5.24.0", "accelerate": "1.15.0", "numba": "0.68.1", "gguf": "0.19.0"}
H200 = Gpu("H200", (9, 0), 130 * 10**9, 140 * 10**9)
MACHINE = Machine(
    cpu_features=frozenset({"avx2", "avx512f", "avx512_vnni"}),
    physical_cores=8,
    threads=8,
    free_bytes=10**10,
    total_bytes=2 * 10**10,
    gpus=(),
    torch_build="cpu",
    has_nvidia_smi=False,
    cache_free_bytes=10**11,
)


def software(broken: str | None = None, python: str = "3.11.7", **versions: str | None) -> dict[str, Check]:
    installed = {**GOOD, **versions}
    error = "ImportError: lib.so: cannot open shared object file"
    checks = check_software(installed.get, lambda module: error if module == broken else None, python)
    return {check.name: check for check in checks}


def test_a_good_environment_is_ok() -> None:
    assert {check.status for check in software().values()} == {"ok"}


@pytest.mark.parametrize(
    ("versions", "package", "status", "words"),
    [
        ({"transformers": "4.45.2"}, "transformers", "problem", ["needs 5.16", "meets the documents' 4.40", "5.16,<6"]),
        ({"transformers": "4.30.0"}, "transformers", "problem", ["is below the documents' 4.40"]),
        ({"transformers": "6.0.1"}, "transformers", "problem", ["below 6", "pip install"]),
        ({"transformers": None}, "transformers", "problem", ["not installed", "pip install"]),
        ({"torch": "2.0.1"}, "torch", "problem", ["is below the documents' 2.1", "torch>=2.6"]),
        ({"torch": "2.3.0"}, "torch", "problem", ["meets the documents' 2.1", "torch>=2.6"]),
        ({"torch": "2.13.0", "broken": "torch"}, "torch", "problem", ["does not load", "--force-reinstall"]),
        ({"python": "3.9.2"}, "Python", "problem", ["3.10"]),
        ({"bitsandbytes": "0.45", "broken": "bitsandbytes"}, "bitsandbytes", "warning", ["does not load", "reinstall"]),
        ({"bitsandbytes": "0.45"}, "bitsandbytes", "ok", ["0.45, loads"]),
        ({"gptqmodel": None}, "gptqmodel", "ok", ["not installed", "pip install gptqmodel"]),
    ],
)
def test_software(versions: dict[str, Any], package: str, status: str, words: list[str]) -> None:
    check = software(**versions)[package]
    assert check.status == status
    for word in words:
        assert word in f"{check.found} {check.remedy}"


def test_import_errors_come_from_a_real_interpreter() -> None:
    assert import_error("json") is None
    assert "no_such_module_here" in str(import_error("no_such_module_here"))
    assert "code" in str(import_error("os; os._exit(3)"))


@pytest.mark.parametrize(
    ("version", "minimum", "expected"),
    [
        ("2.13.0+cpu", "2.6", True),
        ("2.5.1", "2.6", False),
        ("6", "6", True),
        ("10.0rc1", "9.9", True),
        ("odd", "1", False),
    ],
)
def test_version_order(version: str, minimum: str, expected: bool) -> None:
    assert at_least(version, minimum) is expected


@pytest.mark.parametrize(
    ("changes", "name", "status", "words"),
    [
        ({}, "GPU", "ok", ["none"]),
        ({"gpus": (H200,), "torch_build": "12.8"}, "GPU", "ok", ["H200", "bf16", "fp8", "130 GB free"]),
        ({"gpus": (replace(H200, name="T4", capability=(7, 5)),)}, "GPU", "warning", ["T4", "float16"]),
        ({"gpus": (replace(H200, name="P100", capability=(6, 0)),)}, "GPU", "warning", ["no tensor cores"]),
        ({"torch_build": "12.8"}, "GPU", "warning", ["sees no device", "driver"]),
        ({"has_nvidia_smi": True}, "GPU", "warning", ["CPU build", "pytorch.org"]),
        ({"threads": 64}, "processor", "warning", ["--threads 8"]),
        ({"cpu_features": frozenset({"avx2"})}, "vector units", "warning", ["VNNI"]),
        ({"cpu_features": None}, "vector units", "ok", ["cannot be read"]),
        ({"cache_free_bytes": 10**6}, "disk", "warning", ["GSM_CACHE_DIR"]),
    ],
)
def test_devices(changes: dict[str, Any], name: str, status: str, words: list[str]) -> None:
    check = next(check for check in check_devices(replace(MACHINE, **changes)) if check.name == name)
    assert check.status == status
    for word in words:
        assert word in f"{check.found} {check.remedy}"


def test_whatever_is_not_ok_has_a_remedy() -> None:
    bad = replace(MACHINE, threads=64, cpu_features=frozenset(), has_nvidia_smi=True, cache_free_bytes=0)
    for check in [*check_devices(bad), *software("torch", "3.8", transformers=None).values()]:
        assert check.status == "ok" or check.remedy, check


def test_this_machine_is_read() -> None:
    machine = this_machine()
    assert 0 < machine.free_bytes <= machine.total_bytes
    assert machine.physical_cores >= 1
    assert machine.cpu_features == cpu_features()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 200\n"}, (1000, 500)),
        ({"memory.max": "max", "memory.current": "700", "memory.stat": ""}, None),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "700",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 300\n",
            },
            (1000, 400),
        ),
        (
            {
                "memory/memory.limit_in_bytes": str((1 << 63) - 4096),
                "memory/memory.usage_in_bytes": "7",
                "memory/memory.stat": "",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_a_containers_memory_limit(tmp_path: Path, files: dict[str, str], expected: tuple[int, int] | None) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    limit = container_limit(tmp_path)
    assert (limit and (limit.max_bytes, limit.used_bytes)) == expected
