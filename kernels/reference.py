"""What each kernel means, in plain PyTorch.

Every function here has the signature of the kernel of the same name and is its judge: the kernels must give
the same bits where bytes move and the same result up to the order of sums where they compute. It is also what
runs on a machine without a GPU, so everything is vectorised over lanes and nothing loops over records.

Shapes and words used throughout
--------------------------------
lanes
    Independent streams of selections, ``batch * heads``; lane ``b * heads + h`` belongs to batch row ``b``.
E
    Elements of one record: ``tokens_per_record * (key_width + value_width)``; the keys of all its tokens
    (``[tokens, key_width]``) come first, then the values (``[tokens, value_width]``).
pool
    ``[records, host_lanes, E]`` in (pinned) host memory.
host_rows
    int32 ``[batch, capacity]``: the batch row under which a record lies in the pool. Reordering beams permutes
    this table and moves no data.
buffer, page_table, slot_records, recency
    The hot buffer of a layer: ``[lanes, B, E]`` data, int32 ``[lanes, capacity]`` record -> slot or -1, its inverse
    int32 ``[lanes, B]`` slot -> record or -1, and in which order the slots were used (see `Recency`).
position
    int64 ``[1]`` on the device: cache position of the query token, counted from 0. A tensor, so that a decode
    step can be replayed from a CUDA graph.
"""

from __future__ import annotations

import torch

from .miss_plan import HostSource, MissPlan
from .recency import Recency


def _current(recency: Recency, head: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Which entries of the log are current, bool ``[lanes, N]``; head, tail int64 ``[lanes]``."""
    uses, stamps, _ = recency
    entry = torch.arange(uses.shape[1], device=uses.device)
    inside = (entry >= head[:, None]) & (entry < tail[:, None])
    return inside & (stamps.gather(1, uses.long()) == entry)


def _make_room(
    recency: Recency, needed: torch.Tensor | int, where: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head and tail, int64 ``[lanes]``, after the lanes `where` whose log cannot take `needed` more entries have cleared it."""
    uses, stamps, span = recency
    full = where & (span[:, 1] + needed > uses.shape[1])
    if full.any():
        order = recency.order()
        slots = order.shape[1]
        entry = torch.arange(slots, dtype=torch.int32, device=order.device).expand_as(order)
        uses[:, :slots] = torch.where(full[:, None], order, uses[:, :slots])
        stamps.copy_(
            torch.where(full[:, None], torch.empty_like(stamps).scatter_(1, order.long(), entry), stamps)
        )
        span.copy_(
            torch.where(full[:, None], torch.tensor([0, slots], dtype=torch.int32, device=span.device), span)
        )
    return span[:, 0].long(), span[:, 1].long()


def _use(recency: Recency, slot: torch.Tensor, entry: torch.Tensor, where: torch.Tensor) -> None:
    """Note, `where`, that `slot` is used, as entry number `entry` of the log: all ``[lanes, n]``."""
    lane, at = where.nonzero(as_tuple=True)
    recency.uses[lane, entry[lane, at]] = slot[lane, at].int()
    latest = torch.where(where, entry, -1).int()
    recency.stamps.scatter_reduce_(1, slot.clamp(min=0).long(), latest, "amax")


def append(
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    pool: torch.Tensor,
    host_rows: torch.Tensor,
    buffer: torch.Tensor,
    page_table: torch.Tensor,
    slot_records: torch.Tensor,
    recency: Recency,
    tokens_per_record: int,
    claimed: bool = False,
) -> None:
    """Store one new token per lane, in the host pool and in a slot (write-allocate).

    A token goes to the slot that its record has. The record's first token gives it one, unless `claim` has. A record
    that is still filling but has no slot (its history was cropped) is written to the host alone, to be fetched when it is
    selected.

    Parameters
    ----------
    keys : ``[lanes * parts, key_width]``
        Usually one per lane; a record may consist of several parts, one KV head each, every one laid out as a record is.
    values : ``[lanes * parts, value_width]``, ``value_width`` may be 0
    position : int64 ``[1]``
        Where the token goes; its record is ``position // tokens_per_record``.
    pool, host_rows, buffer, page_table, slot_records, recency
        See the module; all are updated in place.
    claimed : bool
        Whether `claim` was called for this token, and a selection resolved since. Then no slot is given: a record without one
        was evicted again, and any slot that could be taken may be of a record that is about to be read.
    """
    lanes, key_width = slot_records.shape[0], keys.shape[1]
    value_width = values.shape[1]
    record, offset = divmod(int(position), tokens_per_record)
    lane = torch.arange(lanes, device=keys.device)
    if not claimed:
        claim(position, host_rows, page_table, slot_records, recency, tokens_per_record)
    elif not offset:
        _own_rows(host_rows, record)

    key_at = offset * key_width
    value_at = tokens_per_record * key_width + offset * value_width
    parts = keys.shape[0] // lanes
    host = pool[record, :lanes].unflatten(1, (parts, -1))
    slot = page_table[:, record].long()
    here = slot >= 0
    slots = buffer.unflatten(2, (parts, -1))
    for rows, at in ((keys, key_at), (values, value_at)):
        rows = rows.unflatten(0, (lanes, parts))
        columns = slice(at, at + rows.shape[2])
        host[:, :, columns] = rows.to(host.device)
        slots[lane[here], slot[here], :, columns] = rows[here]


def claim(
    position: torch.Tensor,
    host_rows: torch.Tensor,
    page_table: torch.Tensor,
    slot_records: torch.Tensor,
    recency: Recency,
    tokens_per_record: int,
) -> None:
    """Give the record of a new token its slot, where the token is its first one and it has none yet.

    It takes the least recently used slot (an empty one first), which becomes the most recently used. `host_rows` is set to each
    row's own place, also where a slot is held already. The record can be selected from then on; its token comes with `append`.

    Parameters
    ----------
    position, host_rows, page_table, slot_records, recency, tokens_per_record
        As in `append`; `host_rows`, `page_table`, `slot_records` and `recency` are updated in place.
    """
    record, offset = divmod(int(position), tokens_per_record)
    if offset:
        return
    _own_rows(host_rows, record)
    without = page_table[:, record] < 0
    if not without.any():
        return
    lane = without.nonzero()[:, 0]
    head, tail = _make_room(recency, 1, without)
    entry = _current(recency, head, tail)[lane].int().argmax(dim=1)  # the first one
    slot = recency.uses[lane, entry].long()
    recency.span[lane, 0] = entry.int() + 1
    slots = torch.full_like(page_table[:, 0], -1, dtype=torch.int64)
    slots[lane] = slot
    _use(recency, slots[:, None], tail[:, None], without[:, None])
    recency.span[lane, 1] = tail[lane].int() + 1
    evicted = slot_records[lane, slot].long()
    resident = evicted >= 0
    page_table[lane[resident], evicted[resident]] = -1
    page_table[lane, record] = slot.to(page_table.dtype)
    slot_records[lane, slot] = record


def _own_rows(host_rows: torch.Tensor, record: int) -> None:
    """Let each batch row have a record at its own place."""
    host_rows[:, record] = torch.arange(len(host_rows), dtype=host_rows.dtype, device=host_rows.device)


def write_row(
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    host_rows: torch.Tensor,
    buffer: torch.Tensor,
    tokens_per_record: int = 1,
) -> None:
    """Store one new token per lane, in the host pool and in a slot that is already chosen.

    What `append` does in a layer that has the same records in the same slots as another one, whose tables it shares; and in
    one whose slots always hold the same records.

    Parameters
    ----------
    keys : ``[lanes, key_width]``
    values : ``[lanes, value_width]``, ``value_width`` may be 0
    position : int64 ``[1]``
        Where the token goes; its record is ``position // tokens_per_record``.
    slots : int32 ``[lanes]``
        Where the record is in the buffer; -1 for the host alone.
    pool, host_rows, buffer
        See the module; all are updated in place.
    """
    lanes, key_width = keys.shape
    batch = host_rows.shape[0]
    record, offset = divmod(int(position), tokens_per_record)
    host_rows[:, record] = torch.arange(batch, dtype=host_rows.dtype, device=host_rows.device)
    lane = (slots >= 0).nonzero()[:, 0]
    value_at = tokens_per_record * key_width + offset * values.shape[1]
    for row, at in ((keys, offset * key_width), (values, value_at)):
        columns = slice(at, at + row.shape[1])
        pool[record, :lanes, columns] = row.to(pool.device)
        buffer[lane, slots[lane].long(), columns] = row[lane]


def resolve(
    selection: torch.Tensor,
    position: torch.Tensor,
    page_table: torch.Tensor,
    slot_records: torch.Tensor,
    recency: Recency,
    counters: torch.Tensor,
    slots: torch.Tensor,
    plan: MissPlan,
    tokens_per_record: int,
) -> None:
    """Turn selected records into slots, and plan the fetch of those that have none.

    1. -1 in a selection is padding, its slot is -1. Duplicates are legal: all get one slot, fetched once.
    2. Hits keep their slot. Misses, in selection order, take the least recently used slots that no record of
       this selection holds.
    3. The new order is: stale slots (old relative order), slots of the misses, slots of the hits, both from the last to
       the first of the selection: what a query names first, its best, is the most recent (a duplicate counts where it is
       named first). While the whole history fits the buffer and nothing is missing, the order stays as it is.

    Parameters
    ----------
    selection : int32 or int64 ``[lanes, k]``, ``k <= B``
        Records to read, -1 for none; every record is below the table's capacity.
    position : int64 ``[1]``
        The history holds ``position // tokens_per_record + 1`` records.
    page_table, slot_records, recency
        The hot buffer's state, updated in place.
    counters : int64 ``[lanes, 2]``
        Running totals, added to in place: valid selection entries, and misses among them (a duplicate counts
        as a hit).
    slots : int32 ``[lanes, k]``
        Output: the slot of each selected record, -1 for padding. Every element is written.
    plan : MissPlan
        Output: what `fetch` must bring. Every element is written.
    """
    lanes, k = selection.shape
    slot_count = slot_records.shape[1]
    device = selection.device
    valid = selection >= 0
    record = selection.clamp(min=0).long()
    slot = torch.where(valid, page_table.gather(1, record), -1)
    missing = valid & (slot < 0)

    index = torch.arange(k, device=device).expand(lanes, k)
    first = torch.full_like(page_table, k, dtype=torch.int64)
    first.scatter_reduce_(1, record, torch.where(missing, index, k), "amin")
    fetched = missing & (first.gather(1, record) == index)  # the first of its duplicates
    rank = fetched.cumsum(1) - 1
    count = fetched.sum(1)

    def compact(source: torch.Tensor) -> torch.Tensor:
        """The fetched entries of `source`, in selection order, -1 after the last."""
        out = torch.full((lanes, k + 1), -1, dtype=torch.int32, device=device)
        return out.scatter_(1, torch.where(fetched, rank, k), source.to(torch.int32))[:, :k]

    plan.count.copy_(count)
    plan.records.copy_(compact(record))
    plan.missing.copy_(missing)
    counters[:, 0] += valid.sum(1)
    counters[:, 1] += count

    history_fits = int(position) // tokens_per_record + 1 <= slot_count
    changed = (count > 0) | (not history_fits)
    asking = missing.sum(1)
    head, tail = _make_room(recency, asking + k, changed)
    hit = (slot >= 0) & changed[:, None]
    end = torch.where(changed, tail + asking + k, tail)
    index = torch.arange(k, device=device)
    _use(recency, slot, end[:, None] - 1 - index, hit)

    # The victims are the first current entries: those of hits are outdated now.
    current = _current(recency, head, tail)
    victim = current & (current.cumsum(1) <= count[:, None])
    lane_of, entry = victim.nonzero(as_tuple=True)
    plan.slots.fill_(-1)
    plan.slots[lane_of, victim.cumsum(1)[lane_of, entry] - 1] = recency.uses[lane_of, entry]
    after = torch.arange(recency.uses.shape[1], device=device) + 1
    recency.span[:, 0] = torch.where(victim, after, head[:, None]).amax(1)
    recency.span[:, 1] = end
    _use(recency, plan.slots, (tail + asking)[:, None] - 1 - index, plan.slots >= 0)

    # Forget the evicted, install the fetched.
    lane_of, at = (plan.slots >= 0).nonzero(as_tuple=True)
    target = plan.slots[lane_of, at].long()
    evicted = slot_records[lane_of, target].long()
    was_resident = evicted >= 0
    page_table[lane_of[was_resident], evicted[was_resident]] = -1
    page_table[lane_of, plan.records[lane_of, at].long()] = plan.slots[lane_of, at]
    slot_records[lane_of, target] = plan.records[lane_of, at]

    slots.copy_(torch.where(valid, page_table.gather(1, record), -1))


def fetch(
    pool: torch.Tensor,
    host_rows: torch.Tensor,
    plan: MissPlan,
    buffer: torch.Tensor,
    programs: int | None = None,
) -> None:
    """Copy the planned records from the host pool into their slots, byte for byte.

    Parameters
    ----------
    pool : ``[records, host_lanes, E]``
        Pinned when `buffer` is on a GPU: the GPU's threads read it directly. ``E`` elements must be a multiple of
        16 bytes.
    host_rows : int32 ``[batch, capacity]``
    plan : MissPlan
        Lane ``l`` receives record ``plan.records[l, i]`` in slot ``plan.slots[l, i]`` for ``i < plan.count[l]``.
    buffer : ``[lanes, B, E]``
        Output; slots that the plan does not name are not touched.
    programs : int, optional
        How many GPU programs may share the work: few leave the multiprocessors to what runs beside the copy. Changes no byte.
        Default: as many as the link can use.
    """
    lanes = buffer.shape[0]
    heads = lanes // host_rows.shape[0]
    index = torch.arange(plan.records.shape[1], device=plan.count.device)
    lane, at = (index < plan.count[:, None]).nonzero(as_tuple=True)
    record = plan.records[lane, at].long()
    host_lane = host_rows[lane // heads, record].long() * heads + lane % heads
    data = pool[record.to(pool.device), host_lane.to(pool.device)]
    buffer[lane, plan.slots[lane, at].long()] = data.to(buffer.device)


def fetch_ahead(
    selection: torch.Tensor, slots: torch.Tensor, source: HostSource, buffer: torch.Tensor
) -> None:
    """Copy what a resolve found missing from the host pool into its slots, as `fetch` does.

    Parameters
    ----------
    selection : int32 or int64 ``[lanes, k]``
        What was resolved.
    slots : int32 ``[lanes, k]``
        Its slots.
    source : HostSource
        The host pool, its rows, the page table, and the plan of that resolve.
    buffer : ``[lanes, B, E]``
        Output; other slots are not touched.
    """
    fetch(source.pool, source.host_rows, source.plan, buffer)


def gqa_decode(
    query: torch.Tensor,
    buffer: torch.Tensor,
    selection: torch.Tensor,
    slots: torch.Tensor,
    position: torch.Tensor,
    allowed: torch.Tensor | None,
    tokens_per_record: int,
    key_width: int,
    scaling: float,
    source: HostSource | None = None,
) -> torch.Tensor:
    """Attention of one query token per lane over the selected records, read from their slots.

    ``softmax(scaling * q @ k.T) @ v`` over the tokens of the selected records that are not after `position`
    and are allowed; sums run in selection order, whatever the slots are. fp32 accumulation.

    Parameters
    ----------
    query : ``[lanes, group, key_width]``
        The query heads that share the lane's KV head.
    buffer : ``[buffers, B, E]``
        Lane ``l`` reads buffer ``l // (lanes // buffers)``: usually its own. The queries of one prompt may share their
        records, with record numbers as slots; so may KV heads whose records lie together.
    selection : int ``[lanes, k]``
        Selected records without duplicates, -1 for none.
    slots : int32 ``[lanes, k]``
        Where `resolve` put them; -1 for none.
    position : int64 ``[n]``
        Of lane ``l``: element ``l // (lanes // n)``.
    allowed : bool ``[batch, tokens]`` or None
        False for padding keys, by cache position; None when there is no padding. ``tokens > position``.
    scaling : float
        Usually ``key_width ** -0.5``.
    source : HostSource, optional
        Where the records are that `resolve` found missing, if no `fetch` has brought them: they are read from the host,
        and stored to their slots on the way; those without a slot are kept nowhere. What is missing changes no bit of the
        result.

    Returns
    -------
    ``[lanes, group, value_width]`` in the query's dtype; zeros where no token may be read.
    """
    if source is not None:
        fetch_ahead(selection, slots, source, buffer)
    lanes, k = selection.shape
    value_width = buffer.shape[2] // tokens_per_record - key_width
    data = _selected(buffer, selection, slots, source).float()  # [lanes, k, E]
    keys, values = data.split([tokens_per_record * key_width, tokens_per_record * value_width], dim=2)
    keys = keys.reshape(lanes, k * tokens_per_record, key_width)
    values = values.reshape(lanes, k * tokens_per_record, value_width)

    token = selection[:, :, None] * tokens_per_record + torch.arange(tokens_per_record, device=buffer.device)
    last = position.repeat_interleave(lanes // position.shape[0])[:, None, None]
    readable = (selection[:, :, None] >= 0) & (token <= last)
    token, readable = token.flatten(1), readable.flatten(1)  # [lanes, k * tokens]
    if allowed is not None:
        per_lane = allowed.repeat_interleave(lanes // allowed.shape[0], dim=0)
        readable &= per_lane.gather(1, token.clamp(0, allowed.shape[1] - 1).long())

    # A slot may hold anything where its record has no token yet, NaN included: no product may touch it.
    keys = keys.masked_fill(~readable[:, :, None], 0.0)
    values = values.masked_fill(~readable[:, :, None], 0.0)
    scores = scaling * (query.float() @ keys.transpose(1, 2))
    scores = scores.masked_fill(~readable[:, None, :], float("-inf"))
    # Where no token may be read the softmax is NaN: zero it there alone, a NaN of the model must stay visible.
    weights = torch.softmax(scores, dim=-1).masked_fill(~readable[:, None, :], 0.0)
    return (weights @ values).to(query.dtype)


def _selected(
    buffer: torch.Tensor, selection: torch.Tensor, slots: torch.Tensor, source: HostSource | None
) -> torch.Tensor:
    """Records from their slots, and from the host those that are missing and have none: ``[lanes, k, E]``."""
    lanes, k = selection.shape
    data = buffer.new_zeros((lanes, k, buffer.shape[2]))
    lane, at = (slots >= 0).nonzero(as_tuple=True)
    data[lane, at] = buffer[lane // (lanes // buffer.shape[0]), slots[lane, at].long()]
    if source is None:
        return data
    lane, at = (source.plan.missing & (slots < 0)).nonzero(as_tuple=True)
    heads = lanes // source.host_rows.shape[0]
    record = selection[lane, at].long()
    host_lane = source.host_rows[lane // heads, record].long() * heads + lane % heads
    data[lane, at] = source.pool[record.to(source.pool.device), host_lane.to(source.pool.device)].to(
        data.device
    )
    return data


def rotate(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: ``q * cos + rotate_half(q) * sin``, each product rounded to the dtype, as transformers makes it.

    ``rotate_half`` puts the negative upper half of the channels before the lower one (Su et al., "RoFormer", arXiv 2104.09864,
    eq. 34, with the pairs laid out as in GPT-NeoX).

    Parameters
    ----------
    query : ``[batch, S, heads, width]``
        Contiguous; fp32, bf16, fp16 or fp64; `width` even.
    cos, sin : ``[batch or 1, S, width]``
        In the query's dtype, on its device, contiguous in a batch row.

    Returns
    -------
    ``[batch, heads, S, width]``, contiguous
    """
    low, high = query.chunk(2, dim=-1)
    rotated = query * cos[:, :, None] + torch.cat((-high, low), dim=-1) * sin[:, :, None]
    return rotated.transpose(1, 2).contiguous()


def quest_update(
    keys: torch.Tensor,
    valid: torch.Tensor | None,
    position: torch.Tensor,
    bounds: torch.Tensor,
    page_size: int,
) -> None:
    """Add one token's key to the channel-wise minimum and maximum of its page.

    Parameters
    ----------
    keys : ``[lanes, D]``
    valid : bool ``[batch]`` or None
        False where the token is padding, which enters no page.
    position : int64 ``[1]``
        The token's page is ``position // page_size``; its first token starts the page afresh.
    bounds : ``[lanes, capacity, 2, D]`` in the keys' dtype
        Minimum and maximum per page, updated in place; ``+inf, -inf`` for a page without a key.
    """
    page, offset = divmod(int(position), page_size)
    if offset == 0:
        bounds[:, page, 0] = float("inf")
        bounds[:, page, 1] = float("-inf")
    low, high = keys, keys
    if valid is not None:
        per_lane = valid.repeat_interleave(keys.shape[0] // valid.shape[0])[:, None]
        low = torch.where(per_lane, keys, float("inf"))
        high = torch.where(per_lane, keys, float("-inf"))
    bounds[:, page, 0] = torch.minimum(bounds[:, page, 0], low)
    bounds[:, page, 1] = torch.maximum(bounds[:, page, 1], high)


def quest_scores(
    query: torch.Tensor,
    bounds: torch.Tensor,
    position: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """Upper bound of q.k over each complete page before the query's own, the best of the query group.

    ``max over the group of sum over channels of max(q * min, q * max)`` (Quest, Tang et al. 2024, eq. 2). As
    ``max(q * min, q * max)`` is ``q * max`` for ``q >= 0`` and ``q * min`` otherwise, it is two matrix products.

    Parameters
    ----------
    query : ``[lanes, group, D]``
    bounds : ``[lanes, capacity, 2, D]``
    position : int64 ``[1]``

    Returns
    -------
    fp32 ``[lanes, capacity]``; -inf for the query's own page, those after it and those without a key.
    """
    low, high = bounds.float().unbind(2)
    page = torch.arange(bounds.shape[1], device=bounds.device)
    candidate = (page < position // page_size) & (low <= high).any(2)
    low = low.masked_fill(~candidate[:, :, None], 0.0).transpose(1, 2)
    high = high.masked_fill(~candidate[:, :, None], 0.0).transpose(1, 2)
    query = query.float()
    scores = (query.clamp(min=0) @ high + query.clamp(max=0) @ low).amax(1)
    return scores.masked_fill(~candidate, float("-inf"))


def quest_select(scores: torch.Tensor, position: torch.Tensor, page_size: int, top_k: int) -> torch.Tensor:
    """The query's own page and the best before it.

    Parameters
    ----------
    scores : fp32 ``[lanes, capacity]``
        -inf for a page that is no candidate (see `quest_scores`).
    position : int64 ``[1]``

    Returns
    -------
    int32 ``[lanes, top_k]``: the own page, then the others from the best on, of equal ones the first; -1 after the last.
    """
    lanes, capacity = scores.shape
    bits = (scores + 0.0).view(torch.int32)  # of two zeros one
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    page = torch.arange(capacity, device=scores.device)
    no_page = torch.iinfo(torch.int64).min
    packed = ((ordered << 32) | (0xFFFFFFFF - page)).masked_fill(scores == float("-inf"), no_page)
    best = packed.topk(min(top_k - 1, capacity), dim=1).values
    pages = (0xFFFFFFFF - (best & 0xFFFFFFFF)).masked_fill(best == no_page, -1)
    pages = torch.nn.functional.pad(pages, (0, top_k - 1 - pages.shape[1]), value=-1)
    own = (position // page_size).expand(lanes, 1)
    return torch.cat([own, pages], dim=1).int()


def mla_decode(
    query: torch.Tensor,
    buffer: torch.Tensor,
    selection: torch.Tensor,
    slots: torch.Tensor,
    scaling: float,
    value_width: int,
) -> torch.Tensor:
    """Multi-head latent attention of one query token per lane over the selected rows, read from their slots.

    Absorbed: all heads share one latent row per token, whose first `value_width` elements are the value, too.
    ``softmax(scaling * q @ rows.T) @ rows[:, :value_width]``; sums run in selection order, whatever the slots
    are. fp32 accumulation.

    Parameters
    ----------
    query : ``[lanes, heads, key_width]``
        Latent part, then rope part.
    buffer : ``[buffers, B, key_width]``
        Lane ``l`` reads buffer ``l // (lanes // buffers)``: queries of one prompt may share their rows, with
        record numbers as slots.
    selection : int32 or int64 ``[lanes, k]``
        Selected records without duplicates, -1 for none.
    slots : int32 or int64 ``[lanes, k]``
        Where they lie; not looked at where nothing is selected.
    scaling : float
    value_width : int
        Width of the latent part (DeepSeek: 512 of 576).

    Returns
    -------
    ``[lanes, heads, value_width]`` in the query's dtype; zeros where nothing is selected.
    """
    lanes = query.shape[0]
    selected = selection >= 0
    owner = torch.arange(lanes, device=buffer.device)[:, None] // (lanes // buffer.shape[0])
    rows = buffer[owner, slots.masked_fill(~selected, 0).long()].float()  # [lanes, k, key_width]
    rows = rows.masked_fill(~selected[:, :, None], 0.0)
    scores = scaling * (query.float() @ rows.transpose(1, 2))
    scores = scores.masked_fill(~selected[:, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1).masked_fill(~selected.any(1)[:, None, None], 0.0)
    return (weights @ rows[:, :, :value_width]).to(query.dtype)


def lightning_indexer(
    query: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    start: int,
    allowed: torch.Tensor | None,
    softmax_scale: float,
) -> torch.Tensor:
    """How relevant each key is to each query: ``sum over heads of weight * relu(softmax_scale * q.k)``.

    The lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2, 2025, eq. 1). The operations and their
    order are those of transformers' indexer, so that the same bits come out and the same keys are selected.

    Parameters
    ----------
    query : ``[batch, S, heads, D]``
    keys : ``[batch, T, D]``
    weights : fp32 ``[batch, S, heads]``
        Whatever else the model multiplies them by (``heads ** -0.5``) is in them.
    start : int
        Cache position of the first query.
    allowed : bool ``[batch, T]`` or None
        False for padding keys; None when there is no padding.
    softmax_scale : float
        Usually ``D ** -0.5``; positive.

    Returns
    -------
    fp32 ``[batch, S, T]``; -inf for keys after the query and keys that are not allowed.
    """
    scores = torch.matmul(query.float(), keys.transpose(-1, -2).float().unsqueeze(1)) * softmax_scale
    scores = torch.matmul(weights.unsqueeze(-2), torch.relu(scores)).squeeze(-2)
    key = torch.arange(keys.shape[1], device=keys.device)
    visible = key <= torch.arange(start, start + query.shape[1], device=keys.device)[:, None]  # [S, T]
    if allowed is not None:
        visible = visible & allowed[:, None, :]
    return scores.masked_fill(~visible, float("-inf"))


def block_scores(
    query: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, block_size: int
) -> torch.Tensor:
    """The highest product of each query with the keys of each block.

    The lightning indexer of MiniMax sparse attention (MiniMax-M3). The operations and their order are those of
    transformers' indexer, so that the same bits come out and the same blocks are selected.

    Parameters
    ----------
    query : ``[batch, heads, S, D]``
    keys : ``[batch, T, D]``
        All heads share them.
    hidden : bool ``[batch, S, T]``
        True for keys that the query may not see.
    block_size : int

    Returns
    -------
    fp32 ``[batch, heads, S, ceil(T / block_size)]``; -inf for a block of which the query sees nothing.
    """
    scores = torch.matmul(query.float(), keys.float()[:, None].transpose(-1, -2))
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    missing = -keys.shape[1] % block_size
    if missing:
        scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
    return scores.unflatten(-1, (-1, block_size)).amax(dim=-1)
