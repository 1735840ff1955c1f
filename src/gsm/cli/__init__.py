"""The `gsm` command. Sub-commands load when they are called, so `gsm --help` is instant."""

from __future__ import annotations

import importlib
import signal
import sys
from types import FrameType

import click

# name -> one-line help; the module gsm.cli.<name> defines `command`.
COMMANDS = {
    "bench": "Speed, memory and quality of several arms, side by side.",
    "calibrate": "Find where a model's activations have heavy tails, on real text.",
    "convert": "Change a model's attention (fewer kv heads) and say what it cost.",
    "demo": "See on a real model, in minutes, what GSM does.",
    "diagnose": "Name the cause of a trouble, from result files or from a run.",
    "doctor": "Check software, devices and a model; every problem comes with its remedy.",
    "eval": "Quality of a config against the full cache; exit code 1 when it misses its tolerance.",
    "explain": "Where every token of a sequence is, or why and when it went.",
    "generate": "Generate text through the tiered cache.",
    "lint-prompt": "Why prompts share no prefix, where it breaks, and what to do.",
    "load": "Latency percentiles and paired comparisons of any OpenAI-compatible server.",
    "probe": "Is it the cache? What bounds a request here, and what each lever would give.",
    "plan": "What fits in memory and what tiers can gain, from a config alone.",
    "report": "One self-contained page with pictures from result files.",
    "tune": "Find a config on your own text, one variable at a time, each step proven.",
    "serve": "Serve a model through OpenAI's HTTP API.",
    "smooth": "Smooth a model and run it in int8: quality proved, speed measured, exported.",
}


class LazyGroup(click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"gsm.cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gsm-infer")
def gsm() -> None:
    """Long-context generation made faster and smaller, with quality measured beside it."""


def main() -> None:
    """Entry point: exit code 0 fine, 1 a check did not pass, 2 wrong usage or input."""
    from gsm.errors import GsmError

    signal.signal(signal.SIGTERM, _interrupt)  # a scheduler's stop keeps what is complete, as Ctrl-C does
    try:
        sys.exit(gsm(standalone_mode=False) or 0)
    except GsmError as error:
        click.echo(f"gsm: {error}", err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("gsm: interrupted", err=True)
        sys.exit(130)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell starts background jobs so
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)
