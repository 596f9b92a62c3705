"""Decode steps on a clock."""

from __future__ import annotations

import time

import torch
from tqdm import tqdm
from transformers import Cache, PreTrainedModel


@torch.no_grad()
def step_times(model: PreTrainedModel, cache: Cache, batch: int, steps: int, label: str) -> list[float]:
    """Milliseconds of each of `steps` decode steps of random tokens, one per batch row."""
    tokens, times = torch.randint(0, 1000, (batch, 1), device=model.device), []
    for _ in tqdm(range(steps), desc=label, leave=False):
        _wait(model)
        began = time.perf_counter()
        model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        _wait(model)
        times.append(1000 * (time.perf_counter() - began))
    return times


def _wait(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def gpu_step_time(model: PreTrainedModel, cache: Cache, tokens: torch.Tensor) -> float:
    """Milliseconds of one decode step: on the GPU, which is kept busy until the CPU has launched all of it."""
    inputs = {"input_ids": tokens, "past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    if model.device.type == "cpu":
        began = time.perf_counter()
        model(**inputs)
        return 1000 * (time.perf_counter() - began)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(20_000_000)
    start.record()
    model(**inputs)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)
