"""What the engine counts about itself since it was made. Plain numbers, read by the server's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from gsm.engine.request import Request, Work


@dataclass(slots=True)
class EngineStats:
    num_steps: int = 0
    step_s: float = 0.0  # time inside the model, all steps together
    num_prompt_tokens: int = 0  # computed; cached ones are not
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # choices by finish reason
    failures_in_a_row: int = 0

    def note_step(self, works: Seq[Work], duration_s: float) -> None:
        self.num_steps += 1
        self.step_s += duration_s
        self.num_prompt_tokens += sum(w.num_tokens for w in works if not w.sequence.is_decoding)

    def note_admission(self, request: Request) -> None:
        self.num_cached_tokens += request.num_cached_tokens

    def note_end(self, request: Request) -> None:
        self.finished.update(str(sequence.finish_reason) for sequence in request.sequences)
