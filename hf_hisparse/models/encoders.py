"""Models that keep nothing from one token to the next."""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)


def refuse_encoders(config: PreTrainedConfig, decoder: PreTrainedConfig) -> None:
    """Refuse what its configuration shows to have no decoder, and so no cache (ValueError); in doubt it passes.

    Parameters
    ----------
    config, decoder : PreTrainedConfig
        Of the model, and of what `get_text_config` takes for its decoder.
    """
    kind, says = config.model_type, getattr(decoder, "is_decoder", None)
    generates = (
        kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )
    # Speech models are among these as well, which have a decoder's configuration within their own.
    half = decoder is config and kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    masked = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if not generates and not hasattr(decoder, "vocab_size"):
        reason = "its configuration has no vocabulary"
    elif masked and says is False:
        reason = "its configuration says is_decoder=False"
    elif (
        not generates
        and not says
        and (masked or half or kind in MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES)
    ):
        reason = "transformers has no model of this type that generates without it"
    else:
        return
    raise ValueError(
        f"HiSparseCache serves decoders, {kind!r} is an encoder, which needs no cache ({reason}): leave the cache out"
    )
