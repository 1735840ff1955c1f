"""The parent's side of an arm's process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

import gsm.errors
from gsm.errors import GsmError, MeasurementError
from gsm.measure.bench.spec import Job


class WorkerProcess:
    """A started worker with the model loaded. Raises what the worker raised, as one sentence.

    ``ready`` holds the worker's first answer. Always `close` it.
    """

    def __init__(self, job: Job):
        self.arm = job.arm
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - see close
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gsm.measure.bench.worker", job.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches only the parent, which keeps what is complete
        )
        try:
            self.ready = self._read()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: str) -> dict[str, Any]:
        """Send one request (a method name of `worker.Worker`) and wait for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        return self._read()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._error(answer["error"], answer["kind"])
        return answer

    def _error(self, message: str, kind: str) -> GsmError:
        known = getattr(gsm.errors, kind, None)
        if isinstance(known, type) and issubclass(known, GsmError):
            return known(message)
        first_line = message.splitlines()[0]
        if "allocate memory" in message or "out of memory" in message.lower() or kind == "MemoryError":
            return MeasurementError(f"arm '{self.arm}' ran out of memory; use a shorter prompt or a smaller batch")
        return MeasurementError(f"arm '{self.arm}' failed with {first_line}")

    def _died(self) -> MeasurementError:
        code = self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["no message"])[-1]
        hint = "; the system probably ran out of memory, use a shorter prompt" if code == -9 else f": {last}"
        return MeasurementError(f"the process of arm '{self.arm}' ended with code {code}{hint}")
