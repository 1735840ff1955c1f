"""A scheduler's SIGTERM acts as Ctrl-C, in background jobs too."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from gsm.cli import _interrupt


@pytest.fixture
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def test_termination_interrupts_whatever_ctrl_c_does(handler: signal.Handlers) -> None:
    """A shell starts background jobs with Ctrl-C ignored."""
    signal.signal(signal.SIGINT, handler)
    with pytest.raises(KeyboardInterrupt):
        _interrupt(signal.SIGTERM, None)
