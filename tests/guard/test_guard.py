"""The guard finds sabotage, names it, and leaves the model in the accepted state or as it was."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gsm import smoothing
from gsm.config.smoothing import GuardConfig, SmoothingConfig
from gsm.guard import PairedTest, guarded, search
from gsm.smoothing.edits import Edits
from gsm.smoothing.int8 import int8_modules

LIMITS = GuardConfig(tolerance=10.0, short_tolerance=10.0, max_kl=0.015, search_tokens=512, final_tokens=1024)


def fingerprint(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model: Any, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    return list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For thousands of tiny products: two threads would wait for each other on a busy machine, for minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Any:
    return tiny_model("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def text(model: Any) -> torch.Tensor:
    """Text from the model itself, so that its likelihood means something."""
    start = torch.randint(1, model.config.vocab_size, (64, 1), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    return model.generate(start, do_sample=True, max_new_tokens=63, pad_token_id=0).flatten()


def sabotaging(names: list[str]) -> Callable[..., Any]:
    """`apply`, with the weights of some modules turned upside down unless they were rolled back."""

    @contextlib.contextmanager
    def apply(model: Any, config: Any, *, exclude: Any = (), **rest: Any) -> Iterator[smoothing.Applied]:
        edits = Edits(model)
        try:
            for name in set(names) - set(exclude):
                edits.set_parameter(f"{name}.weight", model.get_submodule(name).weight.flip(0))
            with smoothing.apply(model, config, exclude=exclude, **rest) as applied:
                yield applied
        finally:
            edits.undo()

    return apply


def test_exactly_the_three_sabotaged_modules_are_rolled_back_in_every_seed(model: Any, text: torch.Tensor) -> None:
    config = SmoothingConfig(int8="dynamic", guard=LIMITS)
    with smoothing.apply(model, config) as applied:
        units = applied.units
    assert len(units) == 4 * 7 + 1
    before, exact = fingerprint(model), 0
    for seed in range(20):
        guilty = sorted(random.Random(seed).sample(units, 3))
        outcome = search(model, config, text, apply=sabotaging(guilty))
        exact += outcome.accepted and sorted(outcome.culprits) == guilty and sorted(outcome.rolled_back) == guilty
        assert same(model, before)
    assert exact >= 19


def test_a_good_config_is_accepted_as_it_is(model: Any, text: torch.Tensor) -> None:
    with guarded(model, SmoothingConfig(int8="dynamic", guard=LIMITS), text) as outcome:
        assert outcome.accepted
        assert outcome.rolled_back == []
        assert int8_modules(model)
        assert [step.what for step in outcome.steps] == ["as configured", "confirmation on more tokens"]
    assert not int8_modules(model)


def test_strength_is_lowered_before_anything_is_rolled_back(model: Any, text: torch.Tensor) -> None:
    samples = text[:512].view(8, 64)
    base = SmoothingConfig(enable=True, method="window", precision="fp32", target_layers="all", smooth_strength=0.3)
    test = PairedTest(model, text, 1024, LIMITS)
    kls = []
    for strength in (0.3, 0.15):
        with smoothing.apply(model, base.model_copy(update={"smooth_strength": strength}), samples=samples):
            verdict = test.measure()
            assert verdict.kl is not None
            kls.append(verdict.kl)
    assert kls[1].high < kls[0].high
    limits = LIMITS.model_copy(update={"max_kl": (kls[0].high + kls[1].high) / 2})
    outcome = search(model, base.model_copy(update={"guard": limits}), text, samples=samples)
    assert outcome.accepted
    assert outcome.config.smooth_strength == pytest.approx(0.15)
    assert outcome.rolled_back == []


def test_nothing_is_kept_when_nothing_passes(model: Any, text: torch.Tensor) -> None:
    limits = LIMITS.model_copy(update={"max_kl": 1e-12})
    before = fingerprint(model)
    with guarded(model, SmoothingConfig(int8="dynamic", guard=limits), text) as outcome:
        assert not outcome.accepted
        assert not int8_modules(model)
    assert same(model, before)


def test_a_model_that_overflows_fails_and_is_told_so(model: Any, text: torch.Tensor) -> None:
    test = PairedTest(model, text, 1024, LIMITS)
    old = model.model.norm.weight.detach().clone()
    try:
        with torch.no_grad():
            model.model.norm.weight[0] = float("nan")
        verdict = test.measure()
    finally:
        with torch.no_grad():
            model.model.norm.weight.copy_(old)
    assert not verdict.passed
    assert not verdict.finite
    assert "NaN" in verdict.failures[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_during_the_search_gives_the_model_back(
    model: Any, text: torch.Tensor, error: type[BaseException]
) -> None:
    before, calls = fingerprint(model), 0

    @contextlib.contextmanager
    def apply(model: Any, config: Any, **rest: Any) -> Iterator[smoothing.Applied]:
        nonlocal calls
        calls += 1
        with smoothing.apply(model, config, **rest) as applied:
            if calls == 2:
                raise error
            yield applied

    with pytest.raises(error):
        search(model, SmoothingConfig(int8="dynamic", guard=LIMITS), text, apply=apply)
    assert same(model, before)


def test_coarse_kl_is_close_to_the_exact_one(model: Any, text: torch.Tensor) -> None:
    test = PairedTest(model, text, 1024, LIMITS)
    rows = test._long
    with torch.no_grad():
        p = model(input_ids=rows).logits[:, :-1].double().log_softmax(-1)
        with smoothing.apply(model, {"int8": "dynamic"}):
            q = model(input_ids=rows).logits[:, :-1].double().log_softmax(-1)
            verdict = test.measure()
    exact = float((p.exp() * (p - q)).sum(-1).mean())
    assert verdict.kl is not None
    assert verdict.kl.mean == pytest.approx(exact, rel=0.05)
