"""What is cheaper than any change of the cache, said first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gsm.measure.probe.levers import BATCH, BATCH_HOW, DTYPE_HOW, LINEAR_HOW
from gsm.measure.probe.record import Lever
from gsm.measure.probe.verdict import step_parts
from gsm.models import LoadedModel
from gsm.results import Profile

_WORTH_IT = 1.05  # a gain below this is not worth a sentence
_MUCH = 0.3  # of a step


def cheaper_first(
    loaded: LoadedModel, batch_size: int, profile: Profile | None, levers: Sequence[Lever]
) -> Iterator[str]:
    """One sentence per thing to do before touching the cache, with the gain predicted here; also what does not help."""
    dtype = next((lever for lever in levers if lever.how == DTYPE_HOW), None)
    if dtype is not None:
        yield _weights_sentence(dtype)
    linear = next((lever for lever in levers if lever.how == LINEAR_HOW), None)
    if linear is not None and linear.predicted_gain > _WORTH_IT:
        yield (
            f"GSM's linear layers alone make a step {linear.predicted_gain:.2f} times as fast after "
            f"{linear.context_tokens} tokens (predicted); every arm of GSM includes them, only the rest of its gain is "
            "the cache"
        )
    implementation = loaded.model.config._attn_implementation
    if implementation == "eager":
        yield "attention is 'eager'; load the model with attn_implementation='sdpa' first"
    batch = next((lever for lever in levers if lever.how == BATCH_HOW), None)
    if batch_size == 1 and batch is not None and batch.predicted_gain > _WORTH_IT:
        yield (
            f"one sequence at a time reads all weights for each token; with {BATCH} requests together throughput is "
            f"predicted {batch.predicted_gain:.1f} times as high after {batch.context_tokens} tokens"
        )
    if profile is not None:
        parts = step_parts(profile)
        if parts["overhead"] > _MUCH * sum(parts.values()):
            most = next(iter(profile.host_parts_ms), "n/a")
            yield (
                f"small operations and Python take {parts['overhead']:.3g} ms of each step (most of it in {most}); "
                "torch.compile or a server with compiled graphs comes before any change of the cache"
            )


def _weights_sentence(lever: Lever) -> str:
    gain = f"{lever.predicted_gain:.2f} times as fast"
    if lever.predicted_gain > _WORTH_IT:
        return f"the weights are float32; with --dtype bfloat16 a step is predicted {gain}"
    return (
        f"the weights are float32, but bfloat16 gains nothing on this machine (predicted {gain}): "
        "its matrix products are no faster; int8 weights are the next thing to try (`gsm smooth`)"
    )
