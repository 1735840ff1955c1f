"""Does the quantisation config say what the weight files hold, and is the back end for it here?

Only headers of safetensors files are read: names, dtypes and shapes of the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gsm.measure.doctor.record import Check, Findings
from gsm.measure.doctor.software import BACK_ENDS, VersionOf, installed_version
from gsm.models.checkpoint import Checkpoint, TensorInfo, read_tensors


@dataclass(frozen=True)
class Method:
    """How a quantisation method shows in the files. ``suffixes``: tensor names that pre-quantised weights have."""

    package: str | None
    suffixes: tuple[str, ...]
    on_the_fly: bool = False  # full-precision weights are quantised while loading


METHODS: dict[str, Method] = {
    "gptq": Method("gptqmodel", (".qweight", ".scales")),
    "awq": Method("gptqmodel", (".qweight", ".scales")),
    "bitsandbytes": Method("bitsandbytes", (".absmax", ".SCB", ".weight_format"), on_the_fly=True),
    "fp8": Method(None, (".weight_scale_inv", ".weight_scale"), on_the_fly=True),
    "compressed-tensors": Method("compressed-tensors", (".weight_packed", ".weight_scale")),
    "torchao": Method("torchao", (), on_the_fly=True),
    "mxfp4": Method(None, ("_blocks", "_scales"), on_the_fly=True),
}
_MARKS = {
    ".qweight": "GPTQ or AWQ",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".weight_packed": "compressed-tensors",
}


def check_quantisation(checkpoint: Checkpoint, version_of: VersionOf = installed_version) -> list[Check]:
    """Compare ``quantization_config`` with the tensors of the files (safetensors only)."""
    findings = Findings("model")
    config = checkpoint.config.get("quantization_config")
    tensors = {name: info for file in checkpoint.weights for name, info in read_tensors(file).items()}
    if not tensors:
        findings.warning("quantisation", "the weights are not safetensors and were not looked into", "convert them")
    elif not config:
        _check_plain(findings, checkpoint, tensors)
    else:
        _check_declared(findings, config, tensors, version_of)
    return findings.checks


def _check_plain(findings: Findings, checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo]) -> None:
    for mark, method in _MARKS.items():
        if any(name.endswith(mark) for name in tensors):
            found = f"the files hold {method} tensors (*{mark}) but config.json has no quantization_config"
            findings.problem("quantisation", found, "restore the config.json that belongs to these weights")
            return
    stored = ", ".join(sorted({info.dtype for info in tensors.values()}))
    findings.ok("quantisation", f"none; weights are stored as {stored}")


def _check_declared(
    findings: Findings, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], version_of: VersionOf
) -> None:
    name = str(config.get("quant_method", "")).lower()
    method = METHODS.get(name)
    if method is None:
        known = ", ".join(METHODS)
        findings.warning("quantisation", f"method {name!r} is unknown to this check", f"known here: {known}")
        return
    _check_package(findings, name, method, version_of)
    packed = [tensor for tensor in tensors if tensor.endswith(method.suffixes)] if method.suffixes else []
    if not packed and not method.on_the_fly:
        found = f"config.json says {name}, but no tensor is packed (none ends in {' or '.join(method.suffixes)})"
        findings.problem("quantisation", found, "remove quantization_config, or get the quantised weights")
    elif not packed:
        findings.ok("quantisation", f"{name}: full-precision weights are quantised while loading")
    elif name in ("gptq", "awq"):
        _check_packing(findings, name, config, tensors)
    else:
        findings.ok("quantisation", f"{name}: {len(packed)} packed tensors, as config.json says")


def _check_package(findings: Findings, name: str, method: Method, version_of: VersionOf) -> None:
    if method.package is None or version_of(method.package) is not None:
        return
    install = next((b.install for b in BACK_ENDS if b.package == method.package), f"pip install {method.package}")
    findings.problem("quantisation back end", f"{name} weights need {method.package}, which is not installed", install)


def _check_packing(findings: Findings, name: str, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Bits and group size from the shapes of one layer: qweight packs ``32 / bits`` inputs (GPTQ) or outputs (AWQ)."""
    measured = _measure(name, config, tensors)
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    if measured is None:
        findings.warning("quantisation", f"{name}: the shapes of its tensors cannot be read", "reload the weights")
        return
    layer, real_bits = measured
    if bits is not None and real_bits != float(bits):
        found = f"config.json says {name} with {bits} bits and groups of {group}, but {layer} holds {real_bits:g} bits"
        findings.problem("quantisation", found, "use the quantization config that was saved with these weights")
    else:
        findings.ok("quantisation", f"{name}, {real_bits:g} bits, groups of {group}, as config.json says")


def _measure(name: str, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> tuple[str, float] | None:
    """(layer, bits per weight) of the first packed layer."""
    layer = next(tensor for tensor in sorted(tensors) if tensor.endswith(".qweight")).removesuffix(".qweight")
    packed, scales = tensors[f"{layer}.qweight"].shape, tensors.get(f"{layer}.scales")
    group = config.get("group_size", config.get("q_group_size", 0))
    if scales is None or len(packed) != 2 or len(scales.shape) != 2:
        return None
    if name == "awq":
        return layer, 32 * packed[1] / scales.shape[1]
    if not group or group < 0:  # one group over all inputs: the shapes do not tell how many there are
        return None
    return layer, 32 * packed[0] / (scales.shape[0] * group)
