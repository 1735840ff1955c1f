"""Fixtures shared by all tests: the real demo model, real text, and tiny random models of many families."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

# No test may reach a model hub; set before anything imports huggingface_hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from gsm.models import LoadedModel, load_model
from support_models import TinyModel, build_tiny_model

torch.set_num_threads(min(2, int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)))


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    """The real demo model (SmolLM2-135M-Instruct, float32, eval mode), converted on the first use of a machine."""
    return load_model("demo")


@pytest.fixture(scope="session")
def text_ids(demo: LoadedModel) -> torch.Tensor:
    """Token ids of natural English text (the standard library's help topics), shape [num_tokens], int64."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(demo.tokenizer(text, add_special_tokens=False).input_ids)


@pytest.fixture(scope="session")
def tiny_model() -> TinyModel:
    """``tiny_model(model_type, seed=0, attn="sdpa", **config overrides)``: a random float32 model in eval mode."""
    return build_tiny_model


@pytest.fixture(scope="module")  # not longer: while it lives, no other event loop can run in this thread
def browser() -> Iterator[Any]:
    """Headless Chromium under Playwright, to look at pages as people do."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("no chromium on this machine: install Debian's package `chromium` to look at pages")
    api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    with api.sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield instance
        instance.close()
