"""The process of one arm: it loads the model, then answers requests, one JSON line each, until its input ends.

A process of its own makes the arm's peak memory its own. Run as `python -m gsm.measure.bench.worker JOB`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from contextlib import ExitStack
from typing import Any, TextIO

import psutil
import torch

from gsm.errors import GsmError
from gsm.measure.bench.arms import PLAIN, make_arm, resolve_arm
from gsm.measure.bench.memory import PeakMemory, device_peak_bytes
from gsm.measure.bench.prompt import make_prompt
from gsm.measure.bench.spec import Job
from gsm.measure.bench.timing import memory_bandwidth, timed_run
from gsm.models import load_model
from gsm.models.weights import weight_bytes, weight_read_bytes
from gsm.quality import ModelSession, PlainArm, SmoothedArm, load_thirds


class Worker:
    """One arm on one loaded model. Its public methods are the requests it answers."""

    def __init__(self, job: Job):
        self.job = job
        self.loaded = load_model(job.model, dtype=job.dtype, threads=job.threads, device=job.device)
        thirds = load_thirds(job.text)
        self.prompt = make_prompt(self.loaded, thirds, job.prompt_tokens, job.new_tokens, job.batch_size)
        self.text_sha256 = thirds.sha256("evaluation")
        self.arm = make_arm(resolve_arm(job.arm), self.loaded, job.chunk_tokens, job.text)
        self._kept = ExitStack()
        if isinstance(self.arm, SmoothedArm):
            self._kept.enter_context(self.arm.hold())  # this process runs nothing else
        self._touch_weights()
        self.peak = PeakMemory()

    @torch.inference_mode()
    def _touch_weights(self) -> None:
        """Weights are mapped from their file and become resident when first read: that is loading, not the run."""
        self.loaded.model(input_ids=self.prompt[:1, :8])

    def ready(self) -> dict[str, Any]:
        """What the parent must know before it starts."""
        on_gpu = self.prompt.device.type == "cuda"
        return {
            "model": self.loaded.name,
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(self.prompt.device) if on_gpu else "cpu",
            "threads": torch.get_num_threads(),
            "max_positions": self.loaded.arch.max_position_embeddings,
            "weight_bytes": weight_read_bytes(self.loaded.model),
            "model_bytes": weight_bytes(self.loaded.model),
            "free_bytes": torch.cuda.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available,
            "text_sha256": self.text_sha256,
        }

    def run(self) -> dict[str, Any]:
        """One timed run."""
        ttft_ms, tpot_ms, stats = timed_run(self.arm, self.prompt, self.job.new_tokens)
        return {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "stats": dataclasses.asdict(stats)}

    def memory(self) -> dict[str, Any]:
        """Peak memory of everything since the model was loaded."""
        return {"peak_rss_bytes": self.peak.rss_bytes(), "peak_device_bytes": device_peak_bytes()}

    def unchunked(self) -> dict[str, Any]:
        """TTFT of plain transformers with the whole prompt in one forward pass, in ms."""
        arm = PlainArm(self.loaded.model, name=PLAIN, chunk_tokens=self.prompt.shape[1])
        return {"ttft_ms": timed_run(arm, self.prompt, 1)[0]}

    def profile(self) -> dict[str, Any]:
        """Where a decode step after the prompt spends its time."""
        from gsm.measure.profile import profile_session

        with self.arm.open() as session:
            token = session.prefill(self.prompt).argmax(-1, keepdim=True)
            assert isinstance(session, ModelSession)
            return profile_session(session, token).model_dump(mode="json")

    def bandwidth(self) -> dict[str, Any]:
        """Memory bandwidth of this machine; asked before any run, because its own buffer must not count as a peak."""
        answer = {"bytes_per_s": memory_bandwidth(self.prompt.device)}
        self.peak = PeakMemory()
        return answer


def main() -> None:
    answers = _private_stdout()
    try:
        worker = Worker(Job.from_json(sys.argv[1]))
        _answer(answers, worker.ready())
        for line in sys.stdin:
            _answer(answers, getattr(worker, line.strip())())
    except Exception as error:  # the parent turns it into one sentence
        kind = type(error).__name__
        message = str(error) if isinstance(error, GsmError) else f"{kind}: {error}"
        _answer(answers, {"error": message, "kind": kind})


def _private_stdout() -> TextIO:
    """Keep the answers apart from whatever a library prints: standard output now goes where errors go."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
