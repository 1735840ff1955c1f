"""Processor, GPUs and memory: what they can do that matters here."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from gsm.measure.doctor.record import Check, Findings
from gsm.models.sizes import format_bytes

_CPU_FLAGS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "VNNI", "avx512_bf16": "bf16", "amx_int8": "AMX"}
_TORCH_FLAGS = {"avx512f": "avx512_f"}
_SMALL_DISK_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Gpu:
    """What torch tells about one CUDA device; ``capability`` as in (8, 9)."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Machine:
    """Everything this section looks at, so that tests can describe other machines."""

    cpu_features: frozenset[str] | None  # names of _CPU_FLAGS; None where they cannot be read
    physical_cores: int
    threads: int
    free_bytes: int
    total_bytes: int
    gpus: tuple[Gpu, ...]
    torch_build: str
    has_nvidia_smi: bool
    cache_free_bytes: int


def check_devices(machine: Machine | None = None) -> list[Check]:
    """Findings about ``machine``, by default this one."""
    findings = Findings("devices")
    if machine is None:
        try:
            machine = this_machine()
        except ImportError as error:
            findings.problem("torch", f"does not load: {error}", "reinstall it: pip install --force-reinstall torch")
            return findings.checks
    _check_cpu(findings, machine)
    _check_gpus(findings, machine)
    findings.ok("memory", f"{format_bytes(machine.free_bytes)} free of {format_bytes(machine.total_bytes)}")
    if machine.cache_free_bytes < _SMALL_DISK_BYTES:
        found = f"{format_bytes(machine.cache_free_bytes)} free where converted models are kept"
        findings.warning("disk", found, "free some space, or set GSM_CACHE_DIR to a larger disk")
    return findings.checks


def this_machine() -> Machine:
    """Look at this machine. Raises ImportError when torch is missing or broken."""
    import psutil
    import torch

    from gsm.models.memory import available_bytes, total_bytes
    from gsm.models.sources import cache_directory

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        capability = torch.cuda.get_device_capability(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), capability, free, total))
    return Machine(
        cpu_features=cpu_features(),
        physical_cores=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        threads=torch.get_num_threads(),
        free_bytes=available_bytes(),
        total_bytes=total_bytes(),
        gpus=tuple(gpus),
        torch_build=torch.version.cuda or torch.version.hip or "cpu",
        has_nvidia_smi=shutil.which("nvidia-smi") is not None,
        cache_free_bytes=_free_disk(cache_directory()),
    )


def cpu_features() -> frozenset[str] | None:
    """Which of the features in _CPU_FLAGS the processor has; None where neither torch nor /proc tells."""
    import torch

    tell = getattr(torch.cpu, "get_capabilities", None)
    if tell is not None:
        capabilities = tell()
        return frozenset(flag for flag in _CPU_FLAGS if capabilities.get(_TORCH_FLAGS.get(flag, flag)))
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(_CPU_FLAGS) & frozenset(line.split()) if line else None


def _check_cpu(findings: Findings, machine: Machine) -> None:
    cores = f"{machine.physical_cores} cores, torch uses {machine.threads} threads"
    if machine.threads > 2 * machine.physical_cores:
        findings.warning("processor", cores, f"set --threads {machine.physical_cores} (or OMP_NUM_THREADS)")
    else:
        findings.ok("processor", cores)
    if machine.cpu_features is None:
        findings.ok("vector units", "cannot be read on this system")
        return
    names = ", ".join(name for flag, name in _CPU_FLAGS.items() if flag in machine.cpu_features) or "none of ours"
    if machine.gpus or machine.cpu_features & {"avx512_vnni", "amx_int8"}:
        findings.ok("vector units", names)
    else:
        remedy = "int8 weights will gain little here; KV tiers and sparse attention are not affected"
        findings.warning("vector units", f"{names}; no int8 dot products (VNNI, AMX)", remedy)


def _check_gpus(findings: Findings, machine: Machine) -> None:
    for gpu in machine.gpus:
        _check_gpu(findings, gpu)
    if machine.gpus:
        return
    if machine.torch_build != "cpu":
        remedy = "install the NVIDIA driver (nvidia-smi must list the GPU), or use the CPU build of torch"
        findings.warning("GPU", f"torch is built for CUDA {machine.torch_build} but sees no device", remedy)
    elif machine.has_nvidia_smi:
        remedy = "install a CUDA build: see https://pytorch.org/get-started"
        findings.warning("GPU", "nvidia-smi is here, but this torch is a CPU build", remedy)
    else:
        findings.ok("GPU", "none; everything runs on the processor")


def _check_gpu(findings: Findings, gpu: Gpu) -> None:
    able = [name for name, needed in _GPU_ABILITIES if gpu.capability >= needed]
    version = ".".join(map(str, gpu.capability))
    found = f"{gpu.name} (compute {version}): {', '.join(able) or 'no tensor cores'}; "
    found += f"{format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}"
    if not able:
        findings.warning("GPU", found, "low precision will not be faster here; use float32 or float16 weights")
    elif "bf16" not in able:
        findings.warning("GPU", found, "use float16 instead of bfloat16 (--dtype float16)")
    else:
        findings.ok("GPU", found)


# compute capability from which a GPU has it
_GPU_ABILITIES = (
    ("tensor cores", (7, 0)),
    ("int8 tensor cores", (7, 5)),
    ("bf16", (8, 0)),
    ("fp8", (8, 9)),
)


def _free_disk(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(os.fspath(folder)).free
