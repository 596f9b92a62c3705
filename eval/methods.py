"""The caches that the evaluations compare, behind one switch, and what they hold on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from hf_hisparse import HiSparseCache, Quest, disable
from hf_hisparse.models.family import family_of
from hf_hisparse.sizes import whole_records

METHODS = {
    "dynamic": "transformers' DynamicCache: dense, all KV on the GPU",
    "offloaded": "DynamicCache(offloading=True): dense, all KV copied over the link in every step; needs a GPU",
    "quantized": "QuantizedCache, 4 bits: dense, approximate values; needs optimum-quanto or hqq",
    "hisparse": "HiSparseCache: sparse decode, KV on the host, a hot buffer on the GPU",
    "hisparse-resident": "the same sparse decode with a buffer that holds everything; its answers must be the same",
}
DEFAULT_TOKEN_BUDGET = 2048


@dataclass(frozen=True)
class Method:
    """One of `METHODS` with its settings.

    Parameters
    ----------
    name : str
        A key of `METHODS`.
    token_budget : int, optional
        Tokens that `Quest` reads per query and KV head; default 2048. Not for models that select by themselves.
    device_buffer_tokens : int, optional
        Tokens per lane in the hot buffer of "hisparse"; default twice the budget.
    decode_rows : int
        A call with at most so many new tokens is a decode step, and sparse.

    Raises
    ------
    ValueError
        If the method is unknown, or a setting does not belong to it; if `Quest` does not take the budget.
    """

    name: str
    token_budget: int | None = None
    device_buffer_tokens: int | None = None
    decode_rows: int = 32

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise ValueError(f"method {self.name!r}, must be one of {', '.join(METHODS)}")
        if not self.sparse and (self.token_budget, self.device_buffer_tokens) != (None, None):
            raise ValueError(
                f"method {self.name!r} is dense: token_budget and device_buffer_tokens are for hisparse and hisparse-resident"
            )
        if self.token_budget is not None:
            Quest(self.token_budget)  # refuses what it cannot take before a model is read

    @property
    def sparse(self) -> bool:
        """Whether decode steps are sparse."""
        return self.name.startswith("hisparse")

    @property
    def resident(self) -> bool:
        """Whether the hot buffer must cover the history."""
        return self.name == "hisparse-resident"


class Caches:
    """Empty caches of one method for one model, request after request.

    A `HiSparseCache` is reset and used again, as its pinned memory is worth keeping: the cache handed out before is
    then gone.

    Parameters
    ----------
    model : PreTrainedModel
        Enabled for the sparse methods, disabled for the others.
    method : Method

    Raises
    ------
    ValueError
        If the method does not fit the model or the machine; says what to do.
    """

    def __init__(self, model: PreTrainedModel, method: Method) -> None:
        self.model, self.method = model, method
        self._kept: HiSparseCache | None = None
        self._room = 0  # tokens that the kept cache was made for
        self._quant_backend = _quant_backend() if method.name == "quantized" else ""
        if method.name == "offloaded" and model.device.type != "cuda":
            raise ValueError(
                f"method 'offloaded' copies KV over CUDA streams, and the model is on {model.device}: take another method, or "
                "a machine with a GPU"
            )
        if method.sparse:
            self._selector = _selector(model, method)
            self._family = family_of(model.config, self._selector, "absorb", "per_group", 0, True)
            self.empty(1)  # a setting that does not fit fails before anything is read
        else:
            disable(model)

    def empty(self, tokens: int) -> Cache:
        """A cache that holds nothing, for a request of at most `tokens` tokens, prompt and answer together."""
        config, name = self.model.config, self.method.name
        if name == "dynamic":
            return DynamicCache(config=config)
        if name == "offloaded":
            return DynamicCache(config=config, offloading=True)
        if name == "quantized":
            return QuantizedCache(self._quant_backend, config, q_group_size=_group_size(config))
        if self._kept is None or (self.method.resident and tokens > self._room):
            self._kept, self._room = None, tokens
            self._kept = HiSparseCache(
                self.model,
                self._selector,
                device_buffer_tokens=self._buffer_tokens(tokens),
                decode_rows=self.method.decode_rows,
            )
        self._kept.reset()
        return self._kept

    def _buffer_tokens(self, tokens: int) -> int | None:
        if not self.method.resident:
            return self.method.device_buffer_tokens
        return whole_records(self._family, tokens)


def _selector(model: PreTrainedModel, method: Method) -> Quest | None:
    """Quest for models with grouped-query attention, None for those that select by themselves."""
    layers = DynamicCache(config=model.config).layers
    if not any(hasattr(layer, "update_indexer") or hasattr(layer, "update_index") for layer in layers):
        return Quest(DEFAULT_TOKEN_BUDGET if method.token_budget is None else method.token_budget)
    if method.token_budget is not None:
        raise ValueError(
            f"token_budget={method.token_budget}, but {model.config.model_type!r} brings its own selection: leave it out"
        )
    return None


def _quant_backend() -> str:
    if is_optimum_quanto_available():
        return "quanto"
    if is_hqq_available():
        return "hqq"
    raise ValueError(
        "method 'quantized' is transformers' QuantizedCache, which needs one of two packages: pip install optimum-quanto "
        "(or hqq)"
    )


def _group_size(config: Any) -> int:
    """Elements that share a scale: 64 as in transformers' default, less where a key is narrower."""
    text = config.get_text_config(decoder=True)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return min(64, width)


def kv_bytes(cache: Cache, device: torch.device) -> int:
    """Bytes that `cache` holds on `device` between two steps: KV, and for a `HiSparseCache` selector state and tables too.

    For caches that only grow, that of the last step is the peak. On a machine without a GPU, a `HiSparseCache` says what
    would be on one.
    """
    if isinstance(cache, HiSparseCache):
        return cache.memory().device_bytes
    return sum(tensor.nbytes for tensor in _tensors([vars(layer) for layer in cache.layers], device))


def _tensors(value: Any, device: torch.device) -> Iterator[torch.Tensor]:
    """The plain tensors on `device` inside nested containers and quantised tensors."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, device)
    elif isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            yield from _tensors([getattr(value, name) for name in value.__tensor_flatten__()[0]], device)
        elif value.device.type == device.type:
            yield value
