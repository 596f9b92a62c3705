"""Predict what is missing of a job, on any number of processes, and write its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState
from tqdm import tqdm

from eval.answers import answer
from eval.journal import Journal, digest, read_journals, write_whole
from eval.longbench import prompts
from eval.longbench.data import Sample, keys
from eval.longbench.jobs import Job
from eval.methods import Caches
from eval.prompts import Prompt, encode

Entry = Mapping[str, Any]


def predict(
    job: Job, folder: Path, caches: Caches, tokenizer: Any, max_length: int, split: bool, state: PartialState
) -> list[Entry]:
    """Answer the samples of `job` that no journal in `folder` has, this process its share of them.

    Parameters
    ----------
    folder
        Each process appends to a journal of its own here, a line when a sample is done.
    max_length
        Longer prompts are cut in the middle.
    split
        Feed the question through decode steps.

    Returns
    -------
    What the journals hold of all samples, in the order of the samples, when all processes are done.
    """
    # A sample that has changed since has another key, and is answered again.
    names = [
        f"{name}@{_digest(job, sample)}" for name, sample in zip(keys(job.samples), job.samples, strict=True)
    ]
    done = read_journals(folder.glob(f"{job.name}.*.jsonl"))
    missing = [(name, sample) for name, sample in zip(names, job.samples, strict=True) if name not in done]
    mine = missing[state.process_index :: state.num_processes]
    state.wait_for_everyone()  # all have read before any writes, or their shares would overlap
    bar = tqdm(mine, desc=job.name, unit="sample", disable=not state.is_local_main_process)
    with Journal(folder / f"{job.name}.{state.process_index}.jsonl") as journal:
        for name, sample in bar:
            question = prompts.cut(tokenizer, job.ask(sample), max_length, job.truncate)
            prompt = encode(tokenizer, question, split)
            journal.append({"key": name, **_entry(job, caches, tokenizer, prompt)})
    state.wait_for_everyone()
    done = read_journals(folder.glob(f"{job.name}.*.jsonl"))
    return [done[name] for name in names]


def _digest(job: Job, sample: Sample) -> str:
    """Of all that decides the answer beside the settings of the run; right answers do not, they are read when it is scored."""
    return digest([asdict(job.ask(sample)), job.max_new_tokens])


def _entry(job: Job, caches: Caches, tokenizer: Any, prompt: Prompt) -> dict[str, Any]:
    stops = newline_stops(tokenizer) if job.stop_at_newline else None
    result = answer(caches, prompt, job.max_new_tokens, stop_tokens=stops)
    pred = tokenizer.decode(result.tokens, skip_special_tokens=True)
    return {"pred": pred, "tokens": result.tokens, **asdict(result.measures)}


def newline_stops(tokenizer: Any) -> list[int]:
    """What officially ends an answer of samsum."""
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
    return [token for token in (tokenizer.eos_token_id, newline) if token is not None]


def write_predictions(job: Job, entries: list[Entry]) -> list[dict[str, Any]]:
    """Write the file of `job`, in the order of the samples; returns its lines.

    The official fields, and "tokens": the ids of the answer. Nothing in it depends on time or place, so runs can be compared
    byte by byte.
    """
    lines = [
        {**job.line(sample, entry["pred"]), "tokens": entry["tokens"]}
        for sample, entry in zip(job.samples, entries, strict=True)
    ]
    write_whole(job.path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return lines
