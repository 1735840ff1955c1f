"""What the benchmarks inside vLLM share: one arm after the other in processes of their own, and the result file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_MARK = "gsm-arm "  # before our line: vLLM prints too


def child(name: str) -> dict[str, Any]:
    """This script again with `--child NAME`, which ends with `tell`; what it told."""
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    }  # fmt: skip
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    command = [sys.executable, *sys.argv, "--child", name]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    line = next(x for x in done.stdout.splitlines() if x.startswith(_MARK))
    answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
    return answer


def tell(found: dict[str, Any]) -> None:
    """The child's answer."""
    print(_MARK + json.dumps(found), flush=True)


def write(path: str, result: dict[str, Any]) -> None:
    """Complete or not at all."""
    temporary = Path(path + ".tmp")
    temporary.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(temporary, path)
