"""A tokenizer of single characters for the tiny models, and both saved as a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from .. import models

SPECIAL = ["<pad>", "<s>", "</s>"]  # ids 0, 1, 2, as in tests/models.py
CHAT = "{% for m in messages %}<s>user:\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}answer:\n{% endif %}"


def tokenizer(merges: tuple[tuple[str, str], ...] = (), chat: bool = True) -> PreTrainedTokenizerFast:
    """One token per ASCII character and per merge; `<s>` goes before every text, as with Llama's."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    ascii_only = [character for character in characters if ord(character) < 128 or character in "ĠĊ"]
    tokens = SPECIAL + ascii_only + ["".join(pair) for pair in merges]
    assert len(tokens) <= models.VOCAB
    fast = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, list(merges)))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    if chat:
        made.chat_template = CHAT
    return made


def save_checkpoint(folder: Path) -> Path:
    """A tiny Qwen3 and its tokenizer, as `from_pretrained` wants them."""
    models.build("qwen3").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
