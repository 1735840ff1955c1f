"""One server for all tests of a file: a model can be attached once only, and some files start their own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from serving import Running, run_server

from gsm.models import LoadedModel


@pytest.fixture(scope="module")
def running(demo: LoadedModel) -> Iterator[Running]:
    with run_server(demo) as found:
        yield found


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=120, trust_env=False) as client:
        yield client
