"""Switch a model's attention over to one that understands `HiSparseCache`, and back."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .active import COMPILED, forget_calls, track_calls
from .attention import BASES, IMPLEMENTATIONS
from .graphs import unwrap_forward, wrap_forward
from .models.block_indexer import disable_msa, enable_msa
from .models.dsa import disable_dsa, enable_dsa


def text_config(config: Any) -> Any:
    """The configuration of the decoder that a cache serves (of a vision-language model: its text model)."""
    return config.get_text_config(decoder=True)


def is_enabled(config: Any) -> bool:
    """Whether the model of this configuration understands `HiSparseCache`."""
    return text_config(config)._attn_implementation in BASES


def enable(model: PreTrainedModel) -> None:
    """Let `model` work with `HiSparseCache`; with any other cache, or none, it answers as before.

    Calling it again changes nothing. `disable` undoes it.

    Raises
    ------
    ValueError
        If the model's attention cannot be switched, or is neither "sdpa" nor "eager", or it was given by `torch.compile`.
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError(COMPILED)
    current = text_config(model.config)._attn_implementation
    # If it is among them already, this model is enabled, or another one with which it shares its configuration.
    if current not in BASES:
        if current not in IMPLEMENTATIONS:
            raise ValueError(
                f"{type(model).__name__} uses attn_implementation={current!r}; HiSparse works over {sorted(IMPLEMENTATIONS)}: "
                'call model.set_attn_implementation("sdpa") first'
            )
        _switch(model, IMPLEMENTATIONS[current])
    wrap_forward(model)
    if not is_enabled(model.config):
        raise ValueError(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface, which HiSparse "
            "plugs into: use DynamicCache for it"
        )
    for decoder in decoders_of(model):
        track_calls(decoder)
    enable_dsa(model)
    enable_msa(model)


def disable(model: PreTrainedModel) -> None:
    """Give `model` back the attention it had before `enable`; calling it again changes nothing.

    Of models that share one configuration object all lose it: a `HiSparseCache` then asks to `enable` them again.
    """
    current = text_config(model.config)._attn_implementation
    disable_dsa(model)
    disable_msa(model)
    for decoder in decoders_of(model):
        forget_calls(decoder)
    if current in BASES:
        _switch(model, BASES[current])
    unwrap_forward(model)


def decoders_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The parts of `model` that run its decoder."""
    config = text_config(model.config)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part for part in parts if text_config(part.config) is config]


def _switch(model: PreTrainedModel, implementation: str) -> None:
    decoder = text_config(model.config)
    if decoder is model.config:
        model.set_attn_implementation(implementation)
        return
    names = [name for name in model.config.sub_configs if getattr(model.config, name) is decoder]
    model.set_attn_implementation(dict.fromkeys(names, implementation))
