"""The smoothing windows of running requests: they enter, leave and fork with them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from gsm.engine.request import Sequence, Work
from gsm.smoothing.window import Parameters, Span, StepContext, WindowSmoothing, parameters_for


class Windows:
    """Tells window smoothing whose tokens a step holds. Does nothing where there is none (`smoothing` is None)."""

    def __init__(self, smoothing: WindowSmoothing | None) -> None:
        self.smoothing = smoothing
        self._parameters: dict[Sequence, Parameters] = {}

    def begin_step(self, works: Seq[Work]) -> None:
        if self.smoothing is None:
            return
        spans, start = [], 0
        for work in works:
            sequence, length = work.sequence, len(work.ids)
            spans.append(Span(sequence, start, length, sequence.num_computed, self._parameters_of(sequence)))
            start += length
        self.smoothing.begin_step(StepContext(tuple(spans)))

    def fork(self, source: Sequence, target: Sequence) -> None:
        """`target` goes on with the window of `source`."""
        if self.smoothing is not None:
            self.smoothing.state.copy(source, target)

    def release(self, sequence: Sequence) -> None:
        if self.smoothing is not None:
            self._parameters.pop(sequence, None)
            self.smoothing.release(sequence)

    def _parameters_of(self, sequence: Sequence) -> Parameters:
        """Fixed when the sequence is first seen: by the length it may reach, as the short-request rules want."""
        if sequence not in self._parameters:
            assert self.smoothing is not None
            length = sequence.num_prompt_tokens + sequence.request.sampling.max_tokens
            self._parameters[sequence] = parameters_for(self.smoothing.config, length)
        return self._parameters[sequence]
