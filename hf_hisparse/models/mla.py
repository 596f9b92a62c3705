"""DeepSeek sparse attention over multi-head latent attention: a record is one token's latent and rotated key."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedConfig

from ..active import current_call
from ..gradients import without_gradient
from ..hosted_layer import HostedLayer, LayerSettings, NewTokens
from ..hot_buffer import HotBuffer
from ..masks import allowed_keys, readable
from ..modes import outside_inference_mode, own_sums
from ..padding import Padding
from ..prefetch import FollowerBuffer, Group, Replay, prefetch
from ..records import RecordLayout
from ..selector import LayerShape
from ..versions import new_version
from .indexer import IndexerKeys
from .kv_shape import KvShape, layer_config
from .mla_attention import ExpandedAttention, Folded, UpProjection, absorbed_attention, fold

MLA_MODES = ("absorb", "expand")
# Until then transformers' own caches hold keys and values of all heads, not latents.
_CACHES_EXPANDED = Version(transformers.__version__) < Version("5.18")


@dataclass(frozen=True)
class LatentSettings(LayerSettings):
    """What all latent layers of a cache share.

    Attributes
    ----------
    mla_mode : str
        "absorb": attention over the latent rows. "expand": the model's own keys, values and attention (see
        `ExpandedAttention`).
    prefill_memory : int
        Bytes of device memory that a long call may take beyond its results.
    prefetch : bool
        Fetch for the layers that share a selection as soon as it is known, not when their turn comes.
    """

    mla_mode: str
    prefill_memory: int
    prefetch: bool


class LatentLayer(HostedLayer):
    """A hosted layer of latent rows; the model selects the records. Lane = batch row."""

    model_selects = insists_on_mask = True

    settings: LatentSettings
    state: IndexerKeys
    buffer: HotBuffer | FollowerBuffer  # type: ignore[assignment]
    group: Group

    def __init__(self, layer_idx: int, settings: LatentSettings, padding: Padding) -> None:
        super().__init__(layer_idx, settings, padding)
        self.replays: list[Replay] = []  # of the last decode call, for the layers that follow
        self.prefetched: torch.cuda.Event | None = None
        self._up = UpProjection()
        if settings.mla_mode == "expand":
            self.unsupported_arguments = ("output_attentions",)
        else:
            self.alternative = 'mla_mode="expand", or DynamicCache,'

    def layout_for(self, key_states: torch.Tensor, value_states: torch.Tensor) -> RecordLayout:
        """One token: its latent, then its rotated key."""
        return RecordLayout(1, key_states.shape[3], value_states.shape[3], key_states.dtype)

    def new_state(self, shape: LayerShape) -> IndexerKeys:
        """No indexer keys yet."""
        return IndexerKeys()

    def new_buffer(self, shape: LayerShape, layout: RecordLayout) -> HotBuffer | FollowerBuffer:  # type: ignore[override]
        """Data alone if another layer of the group on this device leads."""
        leading = self.group.leading_buffer(self, shape.device)
        return super().new_buffer(shape, layout) if leading is None else FollowerBuffer(leading, layout)

    def _fits(self, shape: LayerShape, layout: RecordLayout) -> bool:
        if not super()._fits(shape, layout):
            return False
        # A leader may have been resized while those that follow it were reset.
        if self.buffer.data.shape[1] != self.buffer_records:
            return False
        return getattr(self.buffer, "leader", None) is self.group.leading_buffer(self, shape.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens (see `HostedLayer.update`); what is still being fetched for them must have arrived."""
        self._await_prefetch()
        return super().update(key_states, value_states, *args, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Take the indexer keys ``[batch, T, width]`` of the new tokens; those of all tokens, ``[batch, total, width]``.

        Raises
        ------
        RuntimeError
            If these are not the tokens that `update` took last.
        """
        if self.padding.capturing:  # perhaps ahead of `update`
            return self.state.write_at(indexer_key_states, self.position)
        new = self.new_tokens()
        if indexer_key_states.shape[1] != new.keys.shape[2]:
            raise RuntimeError(
                f"{self.name}: indexer keys of {indexer_key_states.shape[1]} tokens, but {new.keys.shape[2]} are new: call "
                "cache.reset() and start again"
            )
        return self.state.write(indexer_key_states, new.start)

    def resize_buffer(self, records: int) -> None:
        """See `HostedLayer.resize_buffer`; a leader does it for those that follow, in its slots."""
        held, self.buffer_records = self.buffer_records, records
        if self.shape is None or records == held:
            return
        self.version = new_version()
        if isinstance(self.buffer, HotBuffer):
            kept = self.buffer.resize(records)
            follower = self.group.next_on_device(self)
            while follower is not None:
                assert isinstance(follower.buffer, FollowerBuffer)
                follower.buffer.resize(records, kept)
                follower = self.group.next_on_device(follower)

    @property
    def obstacle(self) -> str | None:  # type: ignore[override]
        """Why a decode step cannot be captured in a CUDA graph."""
        if self.settings.mla_mode == "expand":
            return 'mla_mode="expand" places keys where the CPU says'
        if self._up.derived:
            return "kv_b_proj is no plain linear layer: its effective weight may change unseen"
        return None

    # ------------------------------------------------------------------ attention

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        base: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the new tokens over the records that the model selected, ``kwargs["indices"]`` ``[batch, S, k]``."""
        kwargs = dict(kwargs)
        indices = kwargs.pop("indices", None)
        if indices is None or mask is None:
            raise ValueError(
                f"{self.name}: the model's attention was called without indices or without a mask, so it is none of the "
                "sparse models that HiSparseCache supports: use DynamicCache"
            )
        expanded = None
        if self.settings.mla_mode == "expand":
            expanded = ExpandedAttention(module, base, self.layout.key_width, kwargs)
        with outside_inference_mode():
            attend = self._prefill if query.shape[2] > self.settings.decode_rows else self._decode
            output = attend(module, query, mask, indices, kwargs["scaling"], expanded)
            new = self.new_tokens()
            self.finish()
        return without_gradient(output, query, new.keys, new.values, *module.kv_b_proj.parameters()), None

    @own_sums
    def _fold(self, module: Any, query: torch.Tensor) -> Folded:
        matrix = self._up.matrix(module.kv_b_proj, self.layout.key_width, query)
        return fold(query, matrix, self.layout.value_width)

    @own_sums
    def _absorbed(
        self,
        folded: Folded,
        rows: torch.Tensor,
        selection: torch.Tensor,
        slots: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        return absorbed_attention(folded, rows, selection, slots, scaling)

    def _prefill(
        self,
        module: Any,
        query: torch.Tensor,
        mask: torch.Tensor,
        indices: torch.Tensor,
        scaling: float,
        expanded: ExpandedAttention | None,
    ) -> torch.Tensor:
        """All new tokens, on slices of the queries."""
        batch, _, count, _ = query.shape
        call = current_call()
        masks = PrefillMask(mask, batch, self.new_tokens().start, call is not None and call.causal)
        rows = self._all_rows()
        if expanded is not None:
            keys, values = expanded.expand(rows)
        output = None
        step = self._slice_rows(query, rows, indices.shape[2])
        for first in range(0, count, step):
            last = min(first + step, count)
            part, chosen = query[:, :, first:last], indices[:, first:last]
            if expanded is not None:
                result = expanded.attend(part, keys, values, masks.in_full(first, last), chosen)
            else:
                selection = masks.readable(chosen, first).flatten(0, 1)
                result = self._absorbed(self._fold(module, part), rows, selection, selection, scaling)
            if output is None:
                output = result.new_empty((batch, count, *result.shape[2:])) if last < count else result
            if output is not result:
                output[:, first:last] = result
        assert output is not None
        self._stored = True
        self.pool.write_records(self.new_tokens().start, rows[:, self.new_tokens().start :])
        self._warm(masks.readable(indices[:, -1:], count - 1)[:, 0], rows)
        return output

    def _slice_rows(self, query: torch.Tensor, rows: torch.Tensor, k: int) -> int:
        """Query rows per slice such that the extra memory stays within the setting."""
        batch, heads, _, _ = query.shape
        if self.settings.mla_mode == "expand":
            per_row = 8 * heads * rows.shape[1]  # scores, or a mask
        else:
            per_row = (
                16 * heads * self.layout.elements + 24 * k
            )  # folded query and output, partial sums, selection
            if not query.is_cuda:
                per_row += 12 * k * self.layout.elements  # the reference gathers
        return max(1, self.settings.prefill_memory // (batch * per_row))

    def _all_rows(self) -> torch.Tensor:
        """The records of all tokens on the device, ``[batch, T, elements]``."""
        new = self.new_tokens()
        rows = self.layout.pack(new.keys, new.values)
        if new.start == 0:
            return rows
        history = rows.new_empty((rows.shape[0], self.get_seq_length(), rows.shape[2]))
        history[:, new.start :] = rows
        with self.stream.records(self, new.start) as records:
            history[:, : new.start] = self.pool.in_lanes(records, 0, new.start)
        return history

    def _warm(self, selection: torch.Tensor, rows: torch.Tensor) -> None:
        chosen = self.choose(selection)
        self.buffer.fill(chosen, rows.gather(1, chosen[:, :, None].expand(-1, -1, rows.shape[2])))
        self.position.fill_(self.get_seq_length())

    def _decode(
        self,
        module: Any,
        query: torch.Tensor,
        mask: torch.Tensor,
        indices: torch.Tensor,
        scaling: float,
        expanded: ExpandedAttention | None,
    ) -> torch.Tensor:
        """One new token after another, each with the selection that the model made for it."""
        new = self.new_tokens()
        follows = isinstance(self.buffer, FollowerBuffer)
        selections = None
        if self.settings.verify or not (follows or self.is_under_way):
            selections = self._select(indices, mask)
        take = self._follow if follows else self._lead
        self.replays = []
        outputs = []
        for i in range(query.shape[2]):
            row = slice(i, i + 1)
            part = query[:, :, row]
            # Before anything is waited for: what is read may still be on its way.
            folded = self._fold(module, part) if expanded is None else None
            selection, slots, *_ = take(i, new, None if selections is None else selections[:, i].contiguous())
            if folded is not None:
                output = self._absorbed(folded, self.buffer.data, selection, slots, scaling)
            else:
                assert expanded is not None
                at = slots.clamp(min=0).long()[:, :, None].expand(-1, -1, self.layout.elements)
                rows = self.buffer.data.gather(1, at)
                output = expanded.decode(part, rows, selection, mask[:, :, row], indices[:, row])
            self.verify(selection, slots)
            self.advance()
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _select(self, indices: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """What the model selected, int ``[batch, S, top_k]``, -1 for none and for what `mask` hides."""
        selections = readable(indices, allowed_keys(mask, indices.shape[0]))
        missing = self.settings.top_k - indices.shape[2]  # one shape for all steps
        return torch.nn.functional.pad(selections, (0, missing), value=-1) if missing > 0 else selections

    def read_ahead(self, select: Callable[[], torch.Tensor], mask: torch.Tensor | None) -> None:
        """Select and fetch beside what the model does now, if it is known that `select` gives what the model selects.

        Parameters
        ----------
        select : callable
            Runs the indexer: int ``[batch, 1, k]``.
        mask : bool or additive ``[batch, 1, 1, T]``
        """
        if not self.reads_ahead or mask is None:
            return

        def read() -> Replay:
            indices = select()
            with outside_inference_mode():
                return self._claim_and_read(self._select(indices, mask)[:, 0].contiguous())

        self._prefetch_next(0, self.begin_ahead(read, (select, mask)))

    def _claim_and_read(self, selection: torch.Tensor | None) -> Replay:
        """Bring what is selected before the query's own token is stored."""
        self.claim()
        return self._read(selection)

    def _read(self, selection: torch.Tensor | None) -> Replay:
        """Bring what is selected."""
        assert selection is not None and isinstance(self.buffer, HotBuffer)
        slots = self.read(selection)
        written = self.buffer.slot_of(self.position) if self._is_followed else None
        return Replay(selection, slots, self.buffer.plan, written)

    @property
    def _is_followed(self) -> bool:
        """Whether other layers read what this one selects."""
        return self.group.members[-1] is not self

    def _lead(self, i: int, new: NewTokens, selection: torch.Tensor | None) -> Replay:
        """Store new token `i`, bring what it selects unless that was read ahead, and let followers know."""
        begun = self.is_under_way
        replay = self.what_was_read(functools.partial(self._claim_and_read, selection))
        self.append(new.keys[:, 0, i], new.values[:, 0, i], claimed=replay is not None)
        if replay is None:
            replay = self._read(selection)
        if new.keys.shape[2] > 1 and self._is_followed:
            replay = replay.kept()
        self.replays.append(replay)
        if not begun:
            self._prefetch_next(i, replay)
        return replay

    def _follow(self, i: int, new: NewTokens, selection: torch.Tensor | None) -> Replay:
        """Do for new token `i` what the leader did; `selection` is looked at with `verify` alone."""
        leader = self.group.leader_of(self, self.position.device)
        assert isinstance(self.buffer, FollowerBuffer) and leader is not None
        replay = leader.replays[i]
        if i or self.prefetched is None:
            self.pool.wait()
            self.buffer.fetch(replay.plan, self.pool)
        self.prefetched = None
        self._prefetch_next(i, replay)
        assert replay.written is not None
        self.buffer.write(new.keys[:, 0, i], new.values[:, 0, i], self.position, replay.written, self.pool)
        if selection is not None and not torch.equal(selection, replay.selection):
            raise RuntimeError(
                f"verify: layer {self.layer_idx} selects something else than layer {leader.layer_idx}, which it shares its "
                "selection with"
            )
        return replay

    def _prefetch_next(self, i: int, replay: Replay) -> None:
        """Start the next layer's fetch of the first new token; those of further tokens must not overtake its attention."""
        if i or not self.settings.prefetch:
            return
        follower = self.group.next_on_device(self)
        if follower is not None:
            prefetch(follower, replay)

    def _await_prefetch(self) -> None:
        if self.prefetched is not None:
            torch.cuda.current_stream(self.position.device).wait_event(self.prefetched)

    def reset(self) -> None:
        """Forget everything (see `HostedLayer.reset`)."""
        self._end_prefetch()
        super().reset()

    def release(self) -> None:
        """See `HostedLayer.release`; after an interrupted call something may still be on its way there."""
        self._end_prefetch()
        super().release()

    def _end_prefetch(self) -> None:
        self._await_prefetch()
        self.prefetched = None

    def restore(self, counts: tuple[int, ...]) -> None:
        """Back to `counts`; an event of the failed capture must not be waited for."""
        self.prefetched = None
        super().restore(counts)


class PrefillMask:
    """The mask of a long call, for some of its rows at a time.

    Parameters
    ----------
    mask : bool or additive ``[batch or 1, 1, S, T]``, or ``[batch or 1, 1, 1, T]`` if `causal`
    batch : int
    start : int
        Position of the first row.
    causal : bool
        Whether `mask` says only which keys are padding (see `Call.causal`).
    """

    def __init__(self, mask: torch.Tensor, batch: int, start: int, causal: bool) -> None:
        self.mask = mask
        self.batch = batch
        self.start = start
        self.causal = causal

    def readable(self, indices: torch.Tensor, first: int) -> torch.Tensor:
        """`indices`, int ``[batch, rows, k]`` of the rows from `first` on, with -1 for what may not be read."""
        count = indices.shape[1]
        if not self.causal:
            return readable(indices, allowed_keys(self.mask[:, :, first : first + count], self.batch))
        padding = allowed_keys(self.mask, self.batch)[:, 0]  # [batch, T]
        own = self.start + first + torch.arange(count, device=indices.device)
        allowed = padding.gather(1, indices.clamp(min=0).flatten(1).long()).view_as(indices)
        return indices.masked_fill(~allowed | (indices < 0) | (indices > own[:, None]), -1)

    def in_full(self, first: int, last: int) -> torch.Tensor:
        """As the model would have made it for these rows: bool or additive ``[batch or 1, 1, rows, T]``."""
        if not self.causal:
            return self.mask[:, :, first:last]
        keys = torch.arange(self.mask.shape[-1], device=self.mask.device)
        future = keys > keys[self.start + first : self.start + last, None]
        return self.mask.masked_fill(
            future, torch.finfo(self.mask.dtype).min if self.mask.is_floating_point() else False
        )


class LatentFamily:
    """Models with DeepSeek sparse attention that hand their selection to the attention function."""

    page_size = 1

    def __init__(
        self, decoder: PreTrainedConfig, layers: list[Any], indexed: list[int], **settings: Any
    ) -> None:
        self._decoder = decoder
        self.name = decoder.model_type
        self.top_k = decoder.index_topk
        self.budget = f"the model's index_topk={self.top_k}"
        self.hosted = indexed
        self.dense: list[int] = []
        self._settings = settings  # of `LatentSettings`
        self._shared = {
            i for i, kind in enumerate(getattr(decoder, "indexer_types", None) or ()) if kind == "shared"
        }
        self._layers = layers

    def layers(self, settings: LayerSettings, padding: Padding) -> list[Any]:
        """See `Family.layers`."""
        latent = LatentSettings(**vars(settings), **self._settings)
        layers = list(self._layers)
        for index in self.hosted:
            layers[index] = LatentLayer(index, latent, padding)
        return layers

    def connect(self, layers: list[Any]) -> None:
        """A full layer and the shared ones after it are one group."""
        groups: list[list[LatentLayer]] = []
        for index in self.hosted:
            if index not in self._shared or not groups:
                groups.append([])
            groups[-1].append(layers[index])
        for members in groups:
            Group(members)

    def kv_shape(self, index: int, hosted: bool) -> KvShape:
        """See `Family.kv_shape`: a latent and a rotated key."""
        config = layer_config(self._decoder, index)
        indexed = index in self.hosted and index not in self._shared
        index_width = config.index_head_dim if indexed else 0
        rotated = getattr(config, "no_rope_layers", None)  # 1 for a layer that has a rotary embedding
        rope = config.qk_rope_head_dim if rotated is None or rotated[index] else 0
        if not hosted and _CACHES_EXPANDED:
            width = config.qk_nope_head_dim + config.qk_rope_head_dim
            return KvShape(config.num_attention_heads, width, config.v_head_dim, index_width)
        return KvShape(1, config.kv_lora_rank, rope, index_width)

    def __repr__(self) -> str:
        return f"{self.name}, index_topk={self.top_k}, mla_mode={self._settings['mla_mode']!r}"
