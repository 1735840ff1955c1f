"""The smoothing windows of running requests: they enter, leave and fork with them.

Every smoothing section in force has a `WindowSmoothing` of its own, with hooks of its own; a step tells each of them
which spans are its requests'. Hooks stay for the life of the engine: without a span of theirs they cost nothing but the
call.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gsm.config.smoothing import SmoothingConfig
from gsm.engine.request import Sequence, Work
from gsm.smoothing.select import window_sites
from gsm.smoothing.window import Parameters, Span, StepContext, WindowSmoothing, parameters_for, window_hooks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Windows:
    """Tells window smoothing whose tokens a step holds. `first` is the one in force when the engine starts, if any."""

    def __init__(self, model: PreTrainedModel, first: WindowSmoothing | None) -> None:
        self._model = model
        self._hooks = ExitStack()
        self._installed: list[WindowSmoothing] = [first] if first is not None else []
        self._parameters: dict[Sequence, Parameters] = {}

    def close(self) -> None:
        self._hooks.close()

    def is_new(self, config: SmoothingConfig) -> bool:
        """Whether `install` would put hooks on the model."""
        return config.is_windowed and self._find(config) is None

    def install(self, config: SmoothingConfig) -> WindowSmoothing | None:
        """The window smoothing of a section, put on the model if it is new; None where the section has none.

        Raises ConfigError when the section does not say which modules it acts on.
        """
        if not config.is_windowed:
            return None
        found = self._find(config)
        if found is None:
            names = [choice.name for choice in window_sites(self._model, config) if choice.chosen]
            found = self._hooks.enter_context(window_hooks(self._model, names, config))
            found.external = True
            self._installed.append(found)
        return found

    def begin_step(self, works: Seq[Work]) -> None:
        for smoothing in self._installed:
            spans, start = [], 0
            for work in works:
                sequence, length = work.sequence, len(work.ids)
                if sequence.request.terms.window is smoothing:
                    parameters = self._parameters_of(sequence, smoothing.config)
                    spans.append(Span(sequence, start, length, sequence.num_computed, parameters))
                start += length
            smoothing.begin_step(StepContext(tuple(spans)))

    def suspend(self) -> None:
        """The next forward pass is nobody's: modules see their inputs as they are."""
        for smoothing in self._installed:
            smoothing.begin_step(StepContext(()))

    def fork(self, source: Sequence, target: Sequence) -> None:
        """`target` goes on with the window of `source`."""
        window = source.request.terms.window
        if window is not None:
            window.state.copy(source, target)

    def release(self, sequence: Sequence) -> None:
        window = sequence.request.terms.window
        if window is not None:
            self._parameters.pop(sequence, None)
            window.release(sequence)

    def _find(self, config: SmoothingConfig) -> WindowSmoothing | None:
        return next((smoothing for smoothing in self._installed if smoothing.config == config), None)

    def _parameters_of(self, sequence: Sequence, config: SmoothingConfig) -> Parameters:
        """Fixed when the sequence is first seen: by the length it may reach, as the short-request rules want."""
        if sequence not in self._parameters:
            length = sequence.num_prompt_tokens + sequence.request.sampling.max_tokens
            self._parameters[sequence] = parameters_for(config, length)
        return self._parameters[sequence]
