"""The attention function ``"cpattn"`` and its mask."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from .. import ops
from .._device import synchronise
from ..context import Chunk, Context
from ..plan import AttendPlan
from ..torch.contexts import dtype_of, place_of
from .cache import PagedLayer, Paging

BLOCK = 16  # tokens of a block, of pages that last for a call


def register() -> None:
    """Makes ``attn_implementation="cpattn"`` known to transformers."""
    AttentionInterface.register("cpattn", attention)
    AttentionMaskInterface.register("cpattn", padding)


def padding(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
            mask_function: Any = causal_mask_function, attention_mask: torch.Tensor | None = None,
            use_vmap: bool = False, **_: Any) -> torch.Tensor | None:
    """The mask of tokens that fill a batch up, bool ``[batch, kv_length]``, or None: what else is masked follows from
    positions. NotImplementedError for masks of other kinds, such as those of packed sequences."""
    if use_vmap:
        raise NotImplementedError("cpattn: a mask function of the model's own; expected causal, windowed or full "
                                  "attention")
    if mask_function is not causal_mask_function:
        # A row sees the one before it, unless another sequence or a chunk begins there.
        rows = torch.arange(1, q_offset + q_length)
        seen = mask_function(torch.arange(batch_size)[:, None], torch.tensor(0), rows[None], rows[None] - 1)
        if not torch.as_tensor(seen).all():
            raise NotImplementedError("cpattn: a mask that cuts sequences, as of packed sequences or chunks; expected "
                                      "causal, windowed or full attention")
    if attention_mask is None:
        return None
    mask = attention_mask[:, kv_offset:kv_offset + kv_length]
    return None if mask.all() else mask


def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
              sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
              is_causal: bool | None = None, **_: Any) -> tuple[torch.Tensor, None]:
    """Attention of ``[batch, heads, tokens, dim]``; ``[batch, tokens, heads, dim]``.

    Keys that a ``PagedCache`` has given go to their pages, and queries attend those; others attend among themselves,
    over pages that last for the call.
    """
    layer = getattr(key, "cpattn_layer", None)
    if layer is None:
        layer = _layer_of_the_call(key, value)
    paging = layer.paging
    paging.unattended = False
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options = {"causal": causal, "window": sliding_window or 0, "scale": scaling or 0.0}
    try:
        _refuse_others(query, attention_mask, dropout)
        if paging.step is None or paging.step.columns != layer.columns:
            paging.step = Step(layer, query, key, value, attention_mask)
        if softcap or s_aux is not None:
            sinks = None if s_aux is None else s_aux.float()
            options["rules"] = ops.ScoreRules(softcap=softcap or 0.0, sink_logits=sinks)
        return _attend(layer, paging.step, query, key, value, options), None
    except Exception:
        paging.go_back(layer.columns - key.shape[2])  # the cache is as it was before the forward
        raise


def _refuse_others(query: torch.Tensor, attention_mask: torch.Tensor | None, dropout: float) -> None:
    """NotImplementedError for attention of other kinds."""
    if dropout or (torch.is_grad_enabled() and query.requires_grad):
        raise NotImplementedError("cpattn: attention has neither dropout nor gradients; use model.eval() and "
                                  "torch.no_grad()")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise NotImplementedError(f"cpattn: a mask of {list(attention_mask.shape)}; expected [batch, keys], or none")


def _layer_of_the_call(key: torch.Tensor, value: torch.Tensor) -> PagedLayer:
    """A layer that holds these keys and nothing else."""
    batch, tokens = key.shape[0], key.shape[2]
    layer = PagedLayer(Paging(batch * -(-tokens // BLOCK), BLOCK))
    layer.update(key, value)
    return layer


class Step:
    """What the layers of one forward have in common: which rows there are, where they are written, and the plan."""

    def __init__(self, layer: PagedLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 mask: torch.Tensor | None):
        batch, tokens = key.shape[0], key.shape[2]
        if query.shape[2] != tokens:
            raise NotImplementedError(f"cpattn: {query.shape[2]} queries and {tokens} new keys; expected "
                                      "self-attention")
        paging, sequences = layer.paging, layer.paging.sequences
        self.columns = layer.columns  # of the layers whose step this is
        kept = [[1] * tokens] * batch if mask is None else mask[:, -tokens:].int().tolist()
        slots = sequences.append(kept)
        counts = [len(row) for row in slots]
        flat = [slot for row in slots for slot in row]
        self.rows: torch.Tensor | None = None  # of [batch * tokens], those of tokens of sequences; None: all
        if len(flat) < batch * tokens:
            columns = [one for row in kept for one in row]
            self.rows = torch.tensor([i for i, one in enumerate(columns) if one], device=key.device)
        self.written: torch.Tensor | None = None  # of those, the ones that this rank keeps; None: all
        if paging.contexts is not None:
            own = [i for i, slot in enumerate(flat) if slot >= 0]
            self.written = torch.tensor(own, dtype=torch.int64, device=key.device)
            flat = [flat[i] for i in own]
        self.slots = torch.tensor(flat, dtype=torch.int64, device=key.device)
        self.plan: AttendPlan | Context
        if paging.contexts is not None:
            self.plan = paging.contexts.take(query, key, value, sum(counts))
            self.plan.plan([Chunk(length - count, count, table)
                            for length, count, table in zip(sequences.lengths, counts, sequences.tables) if count])
        else:
            self.plan = _plan(paging, query, key, value)
            self._work = counts, sequences.lengths, sequences.tables
            self._starts: list[int] | None = []  # for which the plan is set: as yet none

    def rows_begin(self, starts: list[int] | None) -> None:
        """Has the plan be that of queries whose sequences begin at these rows, or, None, lie one behind the other."""
        assert isinstance(self.plan, AttendPlan)
        if starts == self._starts:
            return
        synchronise(self.plan.device)  # the layers before, of this forward or the last, read the plan
        self.plan.set(*self._work, q_starts=starts)
        self._starts = starts


def _plan(paging: Paging, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> AttendPlan:
    """The plan for these heads and widths."""
    shape, dtype = (query.shape[1], key.shape[1], key.shape[3], value.shape[3]), dtype_of(query, key, value)
    found = paging.plans.get((shape, dtype))
    if found is None:
        found = AttendPlan(*shape, block_size=paging.sequences.block_size, dtype=dtype, **place_of(query))
        paging.plans[shape, dtype] = found
    return found


def _rows(x: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
    """Rows [tokens of sequences, heads, dim] of [batch, heads, tokens, dim]; as they lie where all are rows, unless they
    are those of several sequences with the tokens of each within their heads, or heads that were expanded."""
    rows = x.transpose(1, 2).flatten(0, 1)
    if chosen is not None:
        return rows.index_select(0, chosen)
    return rows if rows.stride(2) == 1 and min(rows.stride()) > 0 else rows.contiguous()


def _attend_as_it_lies(step: Step, query: torch.Tensor, layer: PagedLayer,
                       options: dict[str, Any]) -> torch.Tensor | None:
    """Results [batch, tokens, heads, dim] of a contiguous [batch, heads, tokens, dim] of several sequences, which are
    laid out alike. None for queries that lie otherwise, or of which some are no tokens."""
    batch, _, tokens, _ = query.shape
    if batch == 1 or tokens == 1 or step.rows is not None or not query.is_contiguous():
        return None
    step.rows_begin(ops.as_rows(query)[1])
    return ops.attend(step.plan, query, layer.pages, **options).transpose(1, 2)


def _attend(layer: PagedLayer, step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            options: dict[str, Any]) -> torch.Tensor:
    keys, values = _rows(key, step.rows), _rows(value, step.rows)
    if step.written is not None:
        keys, values = keys.index_select(0, step.written), values.index_select(0, step.written)
    assert layer.pages is not None
    ops.kv_write(layer.pages, keys, values, step.slots)
    if isinstance(step.plan, AttendPlan):
        strided = _attend_as_it_lies(step, query, layer, options)
        if strided is not None:
            return strided
        step.rows_begin(None)
        out = ops.attend(step.plan, _rows(query, step.rows), layer.pages, **options)
    else:
        queries = _rows(query, step.rows).contiguous()
        out = _join_heads(step.plan, step.plan.attend(queries, layer.pages, **options))
    batch, heads, tokens, _ = query.shape
    if step.rows is not None:
        all_rows = out.new_zeros((batch * tokens, *out.shape[1:]))
        out = all_rows.index_copy_(0, step.rows, out)
    return out.view(batch, tokens, heads, value.shape[3])


def _join_heads(context: Any, mine: torch.Tensor) -> torch.Tensor:
    """The results of all heads from the slices of the ranks, which may differ by one head."""
    size, heads = context.size, context.shape.q_heads
    widest = -(-heads // size)
    padded = mine.new_zeros((widest, *mine.shape[:1], *mine.shape[2:]))
    padded[:mine.shape[1]] = mine.transpose(0, 1)
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=context.communicator.group)
    bounds = [heads // size * r + heads % size * r // size for r in range(size + 1)]
    return torch.cat([p[:e - b] for p, b, e in zip(parts, bounds, bounds[1:])]).transpose(0, 1).contiguous()
