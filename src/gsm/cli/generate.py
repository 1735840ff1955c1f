"""`gsm generate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from gsm.cli.common import backend_option, check_json_path, json_option, model_options, save

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from gsm.config import GsmConfig
    from gsm.models import LoadedModel
    from gsm.results import GenerateResult


@click.command()
@model_options
@backend_option
@click.option(
    "--forget",
    type=click.Choice(("oldest", "same", "half")),
    default="oldest",
    show_default=True,
    help="What the llamacpp back end forgets when its window is full.",
)
@click.option("--system", help="System prompt of the llamacpp back end; never forgotten.")
@click.option("--prompt", help="The prompt itself.")
@click.option("--prompt-file", metavar="FILE", help="A UTF-8 file that holds the prompt.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--config", metavar="FILE", help="Config file, or the name of an arm such as sparse.")
@click.option("--endless", is_flag=True, help="Go on past the trained window in fixed memory, forgetting the oldest.")
@click.option("--keep-tokens", type=click.IntRange(min=16), help="What --endless keeps; 3/4 of the trained window.")
@click.option("--ignore-eos", is_flag=True, help="Never choose the end of the text before --max-new-tokens.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True), default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--chat/--no-chat", default=None, help="Use the chat template; by default where the model has one.")
@json_option
def command(
    model: str,
    dtype: str,
    threads: int | None,
    device: str,
    prompt: str | None,
    prompt_file: str | None,
    config: str | None,
    chat: bool | None,
    json_path: str | None,
    endless: bool,
    keep_tokens: int | None,
    ignore_eos: bool,
    backend: str,
    window_tokens: int,
    forget: str,
    system: str | None,
    **sampling: Any,
) -> None:
    """Generate text with MODEL through the tiered cache, streaming it to standard output."""
    text = read_prompt(prompt, prompt_file)
    check_json_path(json_path)
    if backend == "llamacpp":
        if endless:
            raise click.UsageError("--endless is for the transformers back end; llamacpp never exceeds its --window")
        keeping = {"window_tokens": window_tokens, "forget": forget}
        _llamacpp(model, text, keeping, threads, json_path, system=system, chat=chat, **sampling)
        return
    from gsm.config.endless import endless_config
    from gsm.errors import InputError
    from gsm.measure.bench import resolve_arm
    from gsm.models import load_model

    if (endless and config) or (keep_tokens and not endless):
        raise InputError("--endless brings its own config and --keep-tokens belongs to it; give --endless alone")
    settings = resolve_arm(config or "tiers").config
    if settings is None:
        raise InputError(f"'{config}' is plain transformers; give a config file, full, tiers or sparse")
    click.echo(f"loading {model} ...", err=True)
    loaded = load_model(model, dtype=dtype, threads=threads, device=device)
    if endless:
        settings = endless_config(loaded.arch.max_position_embeddings, keep_tokens)
    ids = encode_prompt(loaded, text, chat)
    result = stream(loaded, settings, ids, on_text=_show, ignore_eos=ignore_eos, **sampling)
    click.echo()
    click.echo(summary_line(result), err=True)
    save(json_path, result)


def _llamacpp(
    model: str, text: str, keeping: dict[str, Any], threads: int | None, json_path: str | None, **sampling: Any
) -> None:
    from gsm.integrations.llamacpp import EndlessOptions, generate_gguf, load_gguf
    from gsm.models.sources import DEMO, demo_gguf_path

    options = EndlessOptions(**keeping)
    llm = load_gguf(demo_gguf_path() if model == DEMO else model, options.window_tokens, threads)
    result = generate_gguf(llm, text, options=options, on_text=_show, **sampling)
    click.echo()
    click.echo(summary_line(result), err=True)
    save(json_path, result)


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt from one of the two options. Raises InputError."""
    from gsm.errors import InputError
    from gsm.results import read_text

    if (prompt is None) == (prompt_file is None):
        raise InputError("give exactly one of --prompt and --prompt-file")
    if prompt_file is not None:
        prompt = read_text(prompt_file, "prompt file")
    assert prompt is not None
    if not prompt.strip():
        raise InputError("the prompt is empty; give at least one word")
    return prompt


def encode_prompt(loaded: LoadedModel, text: str, chat: bool | None) -> torch.Tensor:
    """Ids [1, n] of the prompt, through the chat template where the model has one and it is wanted."""
    from gsm.errors import InputError

    tokenizer = loaded.tokenizer
    if chat and not tokenizer.chat_template:
        raise InputError(f"{loaded.name} has no chat template; use --no-chat")
    templated = chat or (chat is None and tokenizer.chat_template)
    if templated:
        message = [{"role": "user", "content": text}]
        text = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    ids = tokenizer(text, add_special_tokens=not templated, return_tensors="pt")["input_ids"]
    result: torch.Tensor = ids.to(loaded.model.device)
    return result


def stream(
    loaded: LoadedModel,
    config: GsmConfig,
    ids: torch.Tensor,
    *,
    on_text: Callable[[str], None],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    ignore_eos: bool = False,
) -> GenerateResult:
    """Generate after ``ids`` [1, n] with ``model.generate`` inside `gsm.attach`; a temperature of 0 is greedy.

    Raises InputError when the prompt does not fit the model's window, unless positions are compacted.
    """
    import torch

    import gsm
    from gsm.measure.bench.prompt import check_window
    from gsm.quality import calibration_samples
    from gsm.results import GenerateResult, collect_environment

    if config.cache.positions == "logical":
        check_window(loaded, ids.shape[1], max_new_tokens)
    environment = collect_environment(
        model=loaded.name, dtype=str(loaded.model.dtype).removeprefix("torch."), threads=torch.get_num_threads()
    )
    deltas = TextDeltas(loaded.tokenizer, ids.shape[1], on_text)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    if ignore_eos:
        sampling["min_new_tokens"] = max_new_tokens
    torch.manual_seed(seed)
    samples = calibration_samples(loaded, config.smoothing)
    with gsm.attach(loaded.model, config, samples=samples, tokenizer=loaded.tokenizer) as handle:
        deltas.start()
        loaded.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, streamer=deltas, **sampling
        )
        stats = handle.cache.stats() if handle.cache is not None else None
    return GenerateResult(
        environment=environment,
        config=config.model_dump(mode="json"),
        text=deltas.text,
        prompt_tokens=ids.shape[1],
        new_tokens=len(deltas.times_s),
        ttft_ms=deltas.ttft_ms,
        tpot_ms=deltas.tpot_ms,
        kv_bytes=stats.kv_bytes if stats else None,
        kv_pool_bytes=stats.kv_pool_bytes if stats else None,
        attended_tokens_mean=stats.attended_tokens_mean if stats else None,
    )


class TextDeltas:
    """A transformers streamer: token ids in, text pieces out, no piece with half a character.

    The pieces joined are the decoded whole: each is the difference of two decodings that start a few tokens back, so
    that tokenizers which treat the first token of a text differently still agree. Times are per token, on arrival.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int, on_text: Callable[[str], None]):
        self._tokenizer, self._to_skip, self._on_text = tokenizer, prompt_tokens, on_text
        self._ids: list[int] = []
        self._context, self._shown = 0, 0  # decodings start at _context; text is out up to token _shown
        self._start_s = 0.0
        self.text = ""
        self.times_s: list[float] = []

    def start(self) -> None:
        self._start_s = time.perf_counter()

    def put(self, value: Any) -> None:
        """Called by `generate` with the prompt first, then with every new token."""
        ids = value.flatten().tolist()
        if self._to_skip:
            self._to_skip = max(0, self._to_skip - len(ids))
            return
        self._ids += ids
        self.times_s += [time.perf_counter()] * len(ids)
        piece = self._pending()
        if piece and not piece.endswith("\ufffd"):  # the rest of that character is still to come
            self._emit(piece)

    def end(self) -> None:
        self._emit(self._pending())

    def _pending(self) -> str:
        before = self._decode(self._ids[self._context : self._shown])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _emit(self, piece: str) -> None:
        self._context, self._shown = self._shown, len(self._ids)
        if piece:
            self.text += piece
            self._on_text(piece)

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    @property
    def ttft_ms(self) -> float | None:
        return 1e3 * (self.times_s[0] - self._start_s) if self.times_s else None

    @property
    def tpot_ms(self) -> float | None:
        gaps = len(self.times_s) - 1
        return 1e3 * (self.times_s[-1] - self.times_s[0]) / gaps if gaps > 0 else None


def _show(piece: str) -> None:
    click.echo(piece, nl=False)


def summary_line(result: GenerateResult) -> str:
    """What it cost, in one line."""
    from gsm.cli.tables import format_bytes, format_number

    return (
        f"[{result.prompt_tokens} prompt + {result.new_tokens} new tokens, first after "
        f"{format_number(result.ttft_ms)} ms, then {format_number(result.tpot_ms)} ms each, "
        f"KV {format_bytes(result.kv_bytes)} MiB]"
    )
