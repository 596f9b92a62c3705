"""Decode steps replayed from a CUDA graph, inside an unchanged `generate`.

An eager decode step is bound by the CPU that launches its kernels. With a `HiSparseCache` every tensor of a step keeps
its place and shape: lengths are tensors on the device, and memory grows in coarse steps. So the model's `forward` of one new
token per row is captured once and replayed, as long as nothing that it reads has moved (see `versions`).
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from .active import called_decoder, capturing_cache, refuse_compiled
from .host_memory import pinning
from .hosted_layer import HostedLayer
from .index_first import NotAhead, early_indexers
from .models.gqa import GqaLayer
from .models.overrides import alive, copied
from .modes import keeps, outside_inference_mode
from .query_first import early_queries
from .resident_layer import ResidentLayer

if TYPE_CHECKING:
    from .cache import HiSparseCache

logger = logging.getLogger(__name__)

_CACHE_NAMES = ("cache", "past_key_values")  # from and before transformers 5.24
# What a captured step may be called with, beside a cache, tokens, mask and positions: flags of `generate`.
_FLAGS = ("use_cache", "return_dict", "logits_to_keep")
DEVICE = "cuda"  # the type of device that captures


class ReplayingForward:
    """Stands in for `model.forward`: decode steps with a `HiSparseCache` go through the cache's graphs.

    It goes with a copy or a pickle of the model, bound to that, and does not keep the model alive; with a shallow copy
    (`copy.copy`) it serves whichever of the two is called.

    Parameters
    ----------
    model : PreTrainedModel
    own : callable, optional
        What to call instead of the forward of its class: what somebody else has put into its place.
    """

    def __init__(self, model: PreTrainedModel, own: Callable[..., Any] | None = None) -> None:
        self._model = weakref.ref(model)
        self.own = own
        functools.update_wrapper(self, type(model).forward)
        self.__signature__ = inspect.signature(self._forward_of(model))

    def _forward_of(self, model: PreTrainedModel) -> Callable[..., Any]:
        return types.MethodType(type(model).forward, model) if self.own is None else self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None), None)
        refuse_compiled(cache)
        model = self._holder()
        forward = self._forward_of(model)
        graphs = getattr(cache, "graphs", None)
        if args or not isinstance(graphs, DecodeGraphs):
            return forward(*args, **kwargs)
        return graphs.step(model, forward, kwargs)

    def _holder(self) -> PreTrainedModel:
        """The model that is called: a shallow copy of it has the same attributes, this one among them."""
        called: Any = called_decoder()
        return called if called is not None and vars(called).get("forward") is self else alive(self._model)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayingForward:
        return ReplayingForward(copied(self._model, memo), copy.deepcopy(self.own, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayingForward, (alive(self._model), self.own)


def wrap_forward(model: PreTrainedModel) -> None:
    """Let `model` replay the decode steps of a `HiSparseCache`."""
    if not isinstance(model.forward, ReplayingForward):
        model.forward = ReplayingForward(model, vars(model).get("forward"))


def unwrap_forward(model: PreTrainedModel) -> None:
    """Undo `wrap_forward`."""
    if not isinstance(model.forward, ReplayingForward):
        return
    own = model.forward.own
    if own is None:
        del model.forward  # back to the class's own
    else:
        model.forward = own


@contextmanager
def as_captured(cache: HiSparseCache, masked: bool) -> Iterator[None]:
    """Let a decode step of one token per row be such that it can be captured: every tensor keeps its place and shape."""
    token = capturing_cache.set(cache)
    cache.padding.capturing, cache.padding.masked = True, masked
    try:
        yield
    finally:
        capturing_cache.reset(token)
        cache.padding.capturing = cache.padding.masked = False


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture what is launched in it.

    An error within comes out as it is, and not as the one that CUDA has to say of a capture that broke off. Nothing is collected
    meanwhile: where another graph is destroyed, a capture breaks.
    """
    collects, failed = gc.isenabled(), None
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
    try:
        gc.disable()
        with torch.cuda.graph(graph):
            try:
                yield
            except BaseException as error:
                failed = error
                raise
    except Exception:
        if failed is None:
            raise
    finally:
        if collects:
            gc.enable()
        if stream is not None:  # which torch leaves where a capture ends in an error
            torch.cuda.set_stream(stream)
    if failed is not None:
        try:
            raise failed
        finally:
            del failed, graph  # else the error keeps itself and the graph through this frame


class _Step:
    """One captured step: its inputs, its outputs and the graph between them."""

    @keeps
    def __init__(self, inputs: dict[str, torch.Tensor], key: tuple[Any, ...]) -> None:
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self.key = key
        self.graph = torch.cuda.CUDAGraph()

    def keep(self, output: Any) -> None:
        """Note what the step gives, all but the cache, which would keep itself alive through it."""
        self.kind = type(output)
        self.outputs = {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}
        self.cache_name = next(name for name in _CACHE_NAMES if name in output)

    def replay(self, inputs: dict[str, torch.Tensor], cache: HiSparseCache) -> Any:
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)
        self.graph.replay()
        outputs = {
            name: value.clone() for name, value in self.outputs.items()
        }  # the next replay overwrites them
        return self.kind(**outputs, **{self.cache_name: cache})


class DecodeGraphs:
    """The captured decode steps of one cache.

    Parameters
    ----------
    cache : HiSparseCache
    enabled : bool
        False runs every step eagerly.
    """

    def __init__(self, cache: HiSparseCache, enabled: bool) -> None:
        self._cache = weakref.ref(cache)
        self.enabled = enabled
        self.captures = 0
        self.replays = 0
        self._steps: dict[tuple[int, bool], _Step] = {}
        self._warm: set[tuple[Any, ...]] = set()  # what eager steps of the model `_hooks_of` have prepared
        self._asks_indexers = True  # ahead of the model
        self._refused: str | None = None
        self._said: set[str] = set()  # why steps ran eagerly for a while
        self._hooks_of: weakref.ref[PreTrainedModel] | None = None
        self._hooks: list[dict[int, Any]] = []

    def step(self, model: PreTrainedModel, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Run `forward(**kwargs)`, from a graph where that is possible."""
        cache = self._cache()
        assert cache is not None
        if (
            not self.enabled
            or self._refused
            or not _is_decode(cache, kwargs)
            or not _only_known(cache, kwargs)
        ):
            return forward(**kwargs)
        tokens, mask = kwargs["input_ids"], kwargs.get("attention_mask")
        passing = self._passing_obstacle(model, cache, tokens.device.type)
        if passing:
            self._say_eager(passing)
            return forward(**kwargs)
        length = cache.get_seq_length()
        if mask is None and cache.padding.hides(length, length + 1):  # the layers refuse that
            return forward(**kwargs)
        if mask is not None and _says_otherwise(cache, mask[:, :length]):
            return forward(**kwargs)  # the layers let their selectors know
        shape = (tokens.shape[0], mask is not None)
        hosted = len(cache.hosted_layers)
        warm = (hosted, *shape)  # of this model: another one clears them
        if warm not in self._warm:
            # An eager step compiles kernels, sets up libraries, and shows which layers can read ahead.
            obstacle = _obstacle(model, cache)
            if obstacle:
                self._refuse(obstacle)
            for layer in cache.hosted_layers:
                layer.reads_ahead = False
            with early_queries(model, cache, GqaLayer.expect_query), self._early_indexers(model, read=False):
                output = forward(**kwargs)
            self._warm.add(warm)  # not if it failed on the way
            return output

        cache.check_batch(tokens.shape[0])
        cache.make_room(1)
        if len(cache.hosted_layers) > hosted:
            # Dense layers have moved to the host: other kernels are to be compiled.
            return self.step(model, forward, kwargs)
        for layer in cache.hosted_layers:
            layer.pool.wait()  # a captured step may not wait for an event from outside
        if mask is not None or cache.padding.allowed is not None:
            cache.padding.reserve(len(tokens), cache.capacity, tokens.device)
        positions = kwargs.get("position_ids")
        inputs = {
            "input_ids": tokens,
            "position_ids": torch.full_like(tokens, length) if positions is None else positions,
        }
        flags = {name: kwargs[name] for name in _FLAGS if name in kwargs}
        weights = next(model.parameters()).data_ptr()
        key = (
            id(model),
            model.training,
            weights,
            tuple(flags.items()),
            inputs["position_ids"].shape,
            cache.version,
        )
        step = self._steps.get(shape)
        if step is None or step.key != key:
            self._steps.pop(shape, None)
            step = self._capture(model, forward, cache, inputs, flags, key, mask is not None)
            if step is None:
                return forward(**kwargs)
            self._steps[shape] = step
        self.replays += 1
        with cache.change:
            if mask is not None:
                cache.padding.take(mask, cache.capacity)
            for layer in cache.layers:
                layer.replayed()
            return step.replay(inputs, cache)

    def _capture(
        self,
        model: PreTrainedModel,
        forward: Callable[..., Any],
        cache: HiSparseCache,
        inputs: dict[str, torch.Tensor],
        flags: dict[str, Any],
        key: tuple[Any, ...],
        masked: bool,
    ) -> _Step | None:
        """Capture a step, which runs nothing and changes no counts; None where that cannot be."""
        with outside_inference_mode():
            for layer in cache.layers:  # a replay asks no layer whether it has room
                layer.grow(cache.capacity)
        step = _Step(inputs, key)
        counts = [layer.counts for layer in cache.layers]
        accepted = inspect.signature(forward).parameters
        name = _CACHE_NAMES[0] if _CACHE_NAMES[0] in accepted else _CACHE_NAMES[1]
        try:
            with (
                pinning,
                as_captured(cache, masked),
                early_queries(model, cache, GqaLayer.read_ahead),
                self._early_indexers(model, read=True),
                _recording(step.graph),
            ):
                step.keep(forward(**step.inputs, **flags, attention_mask=None, **{name: cache}))
        except BaseException as error:
            del step.graph  # at once: who keeps the error keeps this frame with it
            if not isinstance(error, Exception):
                raise
            # Whatever a model does that a capture does not allow.
            logger.debug("capturing a decode step failed", exc_info=True)
            if isinstance(error, NotAhead):
                logger.debug("from now on, no indexer is called ahead")
                self._asks_indexers = False
                self._warm.clear()
            else:
                self._refuse(f"{type(error).__name__}: {error}".split("\n")[0])
            return None
        finally:
            for layer, count in zip(cache.layers, counts, strict=True):
                layer.restore(count)
        self.captures += 1
        return step

    def _early_indexers(self, model: PreTrainedModel, read: bool) -> AbstractContextManager[None]:
        """See `early_indexers`; nothing where that went wrong once."""
        cache = self._cache()
        assert cache is not None
        return early_indexers(model, cache, read) if self._asks_indexers else nullcontext()

    def forget(self) -> None:
        """Drop what was captured: the next steps are captured anew."""
        self._asks_indexers = True
        self._steps.clear()
        self._warm.clear()
        self._refused = None
        self._hooks_of = None

    def _refuse(self, reason: str) -> None:
        if self._refused is None:
            logger.warning("HiSparse decodes without CUDA graphs: %s", reason)
            self._refused = reason

    def _passing_obstacle(self, model: PreTrainedModel, cache: HiSparseCache, device: str) -> str | None:
        """Why a step cannot be replayed now, though others may be; None if it can."""
        if cache.trace is not None:  # copies every selection to the CPU
            return f"a trace is being recorded to {cache.trace.path}"
        # A graph would read converted weights, which autocast drops at its end.
        if torch.is_autocast_enabled(device):
            return "torch.autocast is on: leave it out, for a model in bf16 it changes little"
        hooked = self._hooked(model)
        return hooked and f"{hooked} has a forward hook, which a replay would not run: remove it to have them"

    def _hooked(self, model: PreTrainedModel) -> str | None:
        """The kind of a part of the model that has a hook which is neither ours nor transformers' own."""
        if self._hooks_of is None or self._hooks_of() is not model:
            # Not of the model itself: those run around what is replayed.
            parts = [part for part in model.modules() if part is not model]
            self._hooks = [hooks for part in parts for hooks in _forward_hooks(part)]
            self._hooks_of = weakref.ref(model)
            self._warm.clear()  # which layers can read ahead was seen with another model
            self._asks_indexers = True
        # Asked in every step, of hundreds of parts.
        foreign = [hooks for hooks in self._hooks if hooks and any(map(_foreign, hooks.values()))]
        if not foreign:
            return None
        whose = (
            part for part in model.modules() if any(foreign[0] is hooks for hooks in _forward_hooks(part))
        )
        return type(next(whose)).__name__

    def _say_eager(self, reason: str) -> None:
        if reason not in self._said:
            logger.warning("HiSparse decodes without CUDA graphs while %s", reason)
            self._said.add(reason)

    def __repr__(self) -> str:
        if not self.enabled:
            return "off"
        cache = self._cache()
        ahead = sum(layer.reads_ahead for layer in cache.hosted_layers) if cache else 0
        said = f"{self.captures} captured, {self.replays} replayed"
        return self._refused or (f"{said}, layers that read ahead: {ahead}" if ahead else said)


def _forward_hooks(part: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    return part._forward_pre_hooks, part._forward_hooks


def _foreign(hook: Any) -> bool:
    """Whether a forward hook comes from somebody else than transformers, whose own record outputs that a step is asked for."""
    return not str(getattr(hook, "__module__", "")).startswith(("transformers.", f"{__package__}."))


def _says_otherwise(cache: HiSparseCache, mask: torch.Tensor) -> bool:
    """Whether a mask of the keys held changes what a selector has made of them; the GPU is waited for."""
    if cache.hosted_layers[0].model_selects:
        return False
    known = cache.padding.allowed
    if known is not None and len(known) != len(mask):  # not this cache's batch: refused where it is read
        return True
    return cache.padding.first_change(mask) is not None


def _is_decode(cache: HiSparseCache, kwargs: dict[str, Any]) -> bool:
    """Whether a call brings one new token per row to a history on a GPU, and nobody wants gradients."""
    tokens = kwargs.get("input_ids")
    return (
        isinstance(tokens, torch.Tensor)
        and tokens.device.type == DEVICE
        and tokens.ndim == 2
        and tokens.shape[1] == 1
        and cache.get_seq_length() > 0
        and not torch.is_grad_enabled()
        and not torch.cuda.is_current_stream_capturing()
    )


def _only_known(cache: HiSparseCache, kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for nothing but what a captured step can give."""
    unread = cache.hosted_layers[0].unread_inputs
    known = ("input_ids", "attention_mask", "position_ids", *_CACHE_NAMES, *_FLAGS, *unread)
    if any(value is not None and value is not False for name, value in kwargs.items() if name not in known):
        return False
    mask = kwargs.get("attention_mask")
    whole_mask = (
        isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] == cache.get_seq_length() + 1
    )
    return (
        kwargs.get("return_dict") in (None, True)
        and isinstance(kwargs.get("logits_to_keep", 1), int)
        and (mask is None or whole_mask)
    )


def _obstacle(model: PreTrainedModel, cache: HiSparseCache) -> str | None:
    """Why steps of this model and cache cannot be captured, or None."""
    other = [layer for layer in cache.layers if not isinstance(layer, HostedLayer | ResidentLayer)]
    if other:
        return f"a {type(other[0]).__name__} changes its shape with every token"
    obstacle = next((layer.obstacle for layer in cache.hosted_layers if layer.obstacle), None)
    if obstacle:
        return obstacle
    if cache.verifies:
        return "verify=True compares on the CPU in every step"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or next(iter(devices)).type != DEVICE:
        return f"the model's weights lie on {', '.join(sorted(map(str, devices)))}"
    hooked = next((module for module in model.modules() if hasattr(module, "_hf_hook")), None)
    return None if hooked is None else f"{type(hooked).__name__} has an accelerate hook"
