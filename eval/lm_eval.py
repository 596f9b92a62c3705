"""lm-eval with our caches: its command line, and one model more.

    python -m eval.lm_eval --model hf-hisparse --tasks longbench_hotpotqa,ruler_vt \\
        --model_args pretrained=Qwen/Qwen3-8B,method=hisparse,token_budget=2048

`method` is one of `eval.methods.METHODS`; all other arguments are those of lm-eval's "hf". Needs `pip install lm-eval`.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise SystemExit(
        f"eval.lm_eval runs lm-eval's tasks and needs it ({error}): pip install lm-eval"
    ) from error
from tqdm import tqdm

from eval.methods import Caches, Method
from hf_hisparse import HiSparseCache


@register_model("hf-hisparse")
class HiSparseLM(HFLM):
    """lm-eval's transformers model, generating and scoring through a cache of our choice.

    Generation goes through `generate` as ever. The log-likelihood of a continuation is scored as it would be generated: the
    context is prefilled but for its last token, and from there on tokens are fed in calls of at most `decode_rows`, so a
    sparse method reads sparsely. (lm-eval's "hf" scores all of it in one call, which is prefill.)

    Parameters
    ----------
    method, token_budget, device_buffer_tokens
        See `eval.methods.Method`.
    **kwargs
        For `HFLM`.
    """

    def __init__(
        self,
        *args: Any,
        method: str = "hisparse",
        token_budget: int | None = None,
        device_buffer_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._caches = Caches(self.model, Method(method, token_budget, device_buffer_tokens))
        self._steps = self._selected = self._hits = 0

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any
    ) -> torch.Tensor:
        cache = self._caches.empty(max_length)
        output = super()._model_generate(context, max_length, stop, past_key_values=cache, **kwargs)
        self._count(cache)
        return output

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        scores = []
        bar = tqdm(requests, disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        for strings, context, continuation in bar:
            score = self._score(context, continuation)
            scores.append(score)
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, score)
        return scores

    @torch.no_grad()
    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = (context + continuation)[-(self.max_length + 1) : -1]  # as HFLM cuts what is too long
        fed = torch.tensor([ids], device=self.device)
        first = len(ids) - len(continuation)  # whose logits say the continuation's first token
        cache = self._caches.empty(len(ids))
        if first:
            self.model(fed[:, :first], past_key_values=cache, use_cache=True, logits_to_keep=1)
        rows = self._caches.method.decode_rows
        logits = [
            self.model(fed[:, at : at + rows], past_key_values=cache, use_cache=True).logits[0].float()
            for at in range(first, len(ids), rows)
        ]
        self._count(cache)
        logprobs = torch.cat(logits).log_softmax(-1)
        wanted = torch.tensor(continuation, device=self.device)
        greedy = bool((logprobs.argmax(-1) == wanted).all())
        return float(logprobs.gather(1, wanted[:, None]).sum()), greedy

    def _count(self, cache: Any) -> None:
        if isinstance(cache, HiSparseCache):
            stats = cache.stats()
            self._steps += stats.steps
            self._selected += stats.selected
            self._hits += stats.hits

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results; of this process where there are several."""
        return {
            **super().get_model_info(),
            "method": self._caches.method.name,
            "sparse_steps": self._steps,
            "hit_rate": self._hits / self._selected if self._selected else None,
        }


if __name__ == "__main__":
    cli_evaluate()
