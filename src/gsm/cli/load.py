"""`gsm load`: latency percentiles of any OpenAI-compatible server, and paired comparisons of two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gsm.measure.load.plan import LoadPlan
    from gsm.measure.load.target import Target


class _GoodputCommand(click.Command):
    """Lets `--goodput` take several values, as in `--goodput ttft:500 tpot:50`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        expanded: list[str] = []
        for arg in args:
            if expanded[-2:-1] == ["--goodput"] and re.fullmatch(r"[a-z0-9_]+:[\d.]+", arg):
                expanded.append("--goodput")
            expanded.append(arg)
        return super().parse_args(ctx, expanded)


@click.command(cls=_GoodputCommand, short_help="Latency percentiles of any OpenAI-compatible server.")
@click.argument("url", required=False)
@click.option("--ab", nargs=2, metavar="A B", help="Compare two URLs, or header:NAME=VALUE / body:NAME=VALUE twice.")
@click.option("--rounds", type=int, help="Interleaved rounds of a comparison.  [default: up to 10]")
@click.option("-c", "--concurrency", type=int, help="Requests in flight (with --rate: at most).  [default: 1]")
@click.option("-r", "--rate", type=float, help="Poisson arrivals per second instead of a closed loop.")
@click.option("-n", "--requests", type=int, help="Measured requests (per arm).  [default: 100, or until --duration]")
@click.option("--duration", type=float, metavar="S", help="Start no request after so many seconds.")
@click.option("--warmup", type=int, help="Requests sent first and dropped.  [default: one per worker; 8 with --rate]")
@click.option("--api", type=click.Choice(["chat", "completions"]), help="Endpoint.  [default: by the URL, else chat]")
@click.option("--model", help="Model name.  [default: the first that the server lists]")
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option("--prompt-tokens", default=512, show_default=True, help="Length of synthetic prompts (words).")
@click.option("--output-tokens", default=128, show_default=True, help="Most tokens per response.")
@click.option(
    "--prefix-share", default=0.0, show_default=True, help="Share of synthetic prompts that is common to all."
)
@click.option("--prompts", type=click.Path(path_type=Path), help="Prompts from a file: .jsonl, or one per line.")
@click.option("--ignore-eos", is_flag=True, help="Ask for full-length responses (vLLM and others).")
@click.option("--header", multiple=True, metavar="NAME=VALUE", help="Sent with every request.")
@click.option("--body", multiple=True, metavar="NAME=VALUE", help="Body field (JSON value; dots descend).")
@click.option("--api-key-env", metavar="VARIABLE", help="Environment variable whose value is sent as bearer token.")
@click.option("--continuous-usage", is_flag=True, help="Ask for token counts in every chunk (vLLM).")
@click.option(
    "--goodput", multiple=True, metavar="NAME:MS...", help="Count requests within all limits: ttft:500 tpot:50"
)
@click.option("--timeout", default=300.0, show_default=True, help="Seconds until a request counts as failed.")
@click.option("--seed", default=0, show_default=True, help="Of prompts and arrivals.")
@click.option("--details", is_flag=True, help="Keep every request's times and text in the result file.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the result here.")
def command(**options: Any) -> int:
    """Measure TTFT, TPOT, ITL, E2E and throughput of the server at URL.

    \b
    gsm load http://localhost:8000 -c 8 -n 200
    gsm load http://localhost:8000 --rate 2 --duration 60 --goodput ttft:500 tpot:50
    gsm load --ab http://localhost:8000 http://localhost:8001 -c 4 -n 200
    gsm load http://localhost:8000 --ab body:temperature=0 body:temperature=1 -n 100

    Exit code 1 when no request completed; 130 when interrupted (the results so far are kept).
    """
    from rich.console import Console

    from gsm.measure.load.ab import run_comparison
    from gsm.measure.load.render import print_comparison, print_load, progress_on
    from gsm.measure.load.report import LoadResult
    from gsm.measure.load.session import run_load
    from gsm.results import check_writable, write_result

    if options["json_file"]:
        check_writable(options["json_file"])
    targets, plan = _targets(options), _plan(options)
    with progress_on(Console(stderr=True)) as show:
        if options["ab"]:
            result = run_comparison((targets[0], targets[1]), options["ab"], plan, options["rounds"], show)
        else:
            result = run_load(targets[0], plan, show)
    if options["json_file"]:
        write_result(options["json_file"], LoadResult(**result))
    (print_comparison if options["ab"] else print_load)(Console(), result)
    return _exit_code(result)


def _targets(options: dict[str, Any]) -> list[Target]:
    """The server, or both arms of a comparison."""
    import os

    from gsm.errors import ConfigError
    from gsm.measure.load.target import Target, is_url, parse_arm, parse_body, parse_headers, parse_url

    headers, body = parse_headers(options["header"]), parse_body(options["body"])
    if variable := options["api_key_env"]:
        if not os.environ.get(variable):
            raise ConfigError(f"--api-key-env names {variable}, which is not set; export it first")
        headers["Authorization"] = f"Bearer {os.environ[variable]}"
    if options["ignore_eos"]:
        body["ignore_eos"] = True
    usage = {"include_usage": True} | ({"continuous_usage_stats": True} if options["continuous_usage"] else {})
    arms: tuple[str, ...] = options["ab"] or ()
    if options["url"] and any(map(is_url, arms)):
        raise ConfigError(f"--ab names servers itself, so {options['url']} would not be used; drop it")
    if not options["url"] and not all(map(is_url, arms or [""])):
        raise ConfigError("no server was named; give its URL, for example gsm load http://localhost:8000")
    url, api = parse_url(options["url"] or arms[0], options["api"])
    base = Target(url, api, options["model"], options["stream"], headers, body, options["timeout"], usage)
    return [parse_arm(base, arm) for arm in arms] or [base]


def _plan(options: dict[str, Any]) -> LoadPlan:
    from gsm.measure.load.metrics import parse_goodput
    from gsm.measure.load.plan import LoadPlan
    from gsm.measure.load.runner import MAX_REQUESTS, Schedule
    from gsm.measure.load.workload import SyntheticWorkload, Workload, read_prompts

    workload: Workload
    if options["prompts"]:
        workload = read_prompts(options["prompts"], options["output_tokens"])
    else:
        sizes = options["prompt_tokens"], options["output_tokens"]
        workload = SyntheticWorkload(*sizes, options["prefix_share"], options["seed"])
    bounds: dict[str, Any] = {"num_requests": options["requests"]} if options["requests"] is not None else {}
    if options["duration"] is not None:
        bounds = {"num_requests": MAX_REQUESTS} | bounds | {"duration_s": options["duration"]}
    schedule = Schedule(options["concurrency"], options["rate"], **bounds, seed=options["seed"])
    return LoadPlan(workload, schedule, options["warmup"], parse_goodput(options["goodput"]), options["details"])


def _exit_code(result: dict[str, Any]) -> int:
    arms = [result[arm] for arm in "AB"] if result["kind"] == "load_ab" else [result]
    if result["stopped_by"] == "interrupt":
        return 130
    return 1 if any(arm["completed"] == 0 or arm["stopped_by"] == "failures" for arm in arms) else 0
