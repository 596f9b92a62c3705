"""A trace to replay: a real small model over a long real text, or a toy."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from examples.long_text import long_text
from examples.small_model import load_small_model
from hf_hisparse import HiSparseCache, Quest

TITLE = "This text is taken from the documentation of the Python language."
REQUEST = "Read this text, then explain at length and in your own words what it says.\n\n{document}"

# From 5.24 on `generate` also calls it `cache`; `past_key_values` is the name that all versions know.
warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)


class TokenBar(BaseStreamer):
    """A progress bar over new tokens."""

    def __init__(self, tokens: int, label: str) -> None:
        self.bar = tqdm(total=tokens, desc=label)
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Count a token; the first value is the prompt."""
        if self._prompt_seen:
            self.bar.update()
        self._prompt_seen = True

    def end(self) -> None:
        """Close the bar."""
        self.bar.close()


def real_prompt(tokens: int, device: str) -> tuple[PreTrainedModel, torch.Tensor]:
    """SmolLM2-135M-Instruct, and a request about `tokens` long, with Python's own documentation as its text."""
    model, tokenizer = load_small_model(device, torch.float32 if device == "cpu" else torch.bfloat16)

    def encode(document: str) -> torch.Tensor:
        chat = [{"role": "user", "content": REQUEST.format(document=document)}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return prompt["input_ids"]

    document = long_text(tokenizer, tokens - encode("").shape[1], TITLE, depth=0.0)
    return model, encode(document).to(device)


def toy_prompt(tokens: int, device: str) -> tuple[PreTrainedModel, torch.Tensor]:
    """A random model and random tokens, to see that everything runs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval().to(device)
    return model, torch.randint(10, 512, (1, tokens), device=device)


def record(
    model: PreTrainedModel, prompt: torch.Tensor, quest: Quest, new_tokens: int, seed: int, path: Path
) -> None:
    """Sample `new_tokens` tokens after `prompt` (int64 ``[1, T]``) with the default buffer; write the trace to `path`."""
    cache = HiSparseCache(model, quest)
    torch.manual_seed(seed)
    with cache.record_trace(path):
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=True,
            temperature=0.8,
            pad_token_id=0,
            streamer=TokenBar(new_tokens, f"recording over {prompt.shape[1]} tokens"),
        )
