"""A paged cache of transformers: pools of blocks for each layer, and tables that all layers share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .. import ops
from ..cache import PagedCache as Pages
from ..communicator import Communicator
from ..torch.contexts import Contexts
from .sequences import Sequences


class Paging:
    """What the layers of a cache share."""

    def __init__(self, num_blocks: int, block_size: int, communicator: Communicator | None = None):
        self.contexts: Contexts | None = None
        rank, size = 0, 1
        if communicator is not None:
            self.contexts = Contexts(communicator, block_size, "replicated")
            rank, size = communicator.rank, communicator.size
        self.sequences = Sequences(num_blocks, block_size, rank, size)
        self.plans: dict[Any, Any] = {}  # for the heads, widths and dtype of layers
        self.step: Any = None  # what the layers of the forward under way have in common
        self.unattended = False  # keys were given to a model, and no attention has taken them
        self.layers: weakref.WeakSet[PagedLayer] = weakref.WeakSet()

    def go_back(self, columns: int) -> None:
        """Makes the layers and the sequences those of so many columns, or of less where they have less."""
        if columns < self.sequences.columns:
            self.sequences.crop(self.sequences.columns - columns)
        if columns == 0:
            self.sequences.clear()
        for layer in self.layers:
            layer.columns = min(layer.columns, columns)
        self.step = None


class PagedLayer(CacheLayerMixin):
    """The pools of one layer, ``[num_blocks, block_size, kv_heads, dim]``, allocated when its first keys come."""

    is_sliding = False

    def __init__(self, paging: Paging):
        super().__init__()
        self.paging = paging
        paging.layers.add(self)
        self.columns = 0  # tokens that the model has given, those that fill a batch up included
        self.pages: Pages | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        sequences = self.paging.sequences
        self.keys, self.values = (x.new_zeros((sequences.num_blocks, sequences.block_size, x.shape[1], x.shape[3]))
                                  for x in (key_states, value_states))
        self.pages = Pages(self.keys, self.values)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives the new keys back, which name this layer: the attention that they go to writes them, since it alone
        is told which of them are none of a sequence."""
        if self.paging.unattended:
            raise NotImplementedError("cpattn: keys of a PagedCache did not come to the attention 'cpattn' as they "
                                      "were given; expected a model with attn_implementation='cpattn'")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.columns += key_states.shape[2]
        self.paging.unattended = True
        key_states.cpattn_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):
    """The cache of the attention ``"cpattn"``, to be given as ``cache`` (``past_key_values`` before transformers 5.20).

    ``config``: that of the model. ``num_blocks``: blocks of ``block_size`` tokens in each layer's pools on this rank; a
    sequence takes those that it needs. Tokens that the attention mask leaves out are not kept, on whichever side.

    ``group``: a process group of torch.distributed: its ranks share the tokens of every sequence, ``block_size`` in a
    row in turn, and each attends those that it has; creating the cache is collective then.

    ``OutOfMemoryError`` where blocks run out, with the sequences as they were.
    """

    def __init__(self, config: Any, *, num_blocks: int, block_size: int = 16, group: Any = None):
        communicator = Communicator.from_group(group) if group is not None else None
        self.paging = Paging(num_blocks, block_size, communicator)
        text = config.get_text_config(decoder=True)
        self._paged = [PagedLayer(self.paging) for _ in range(text.num_hidden_layers)]
        super().__init__(layers=list(self._paged))

    @property
    def lengths(self) -> list[int]:
        """The tokens of each sequence, on all ranks."""
        return list(self.paging.sequences.lengths)

    @property
    def tables(self) -> list[list[int]]:
        """The blocks of each sequence on this rank."""
        return [list(table) for table in self.paging.sequences.tables]

    def reset(self) -> None:
        """Forgets all sequences; the pools stay."""
        self.paging.sequences.clear()
        self._set_columns(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes away the last ``-tokens_to_remove`` columns of all sequences."""
        if not -self.get_seq_length() <= tokens_to_remove <= 0:
            raise ValueError(f"cpattn: crop of {tokens_to_remove} with {self.get_seq_length()} tokens; expected minus "
                             "the number of tokens to remove")
        if tokens_to_remove:
            self.paging.sequences.crop(-tokens_to_remove)
            self._set_columns(self.get_seq_length() + tokens_to_remove)

    def _set_columns(self, columns: int) -> None:
        self.paging.step = None
        self.paging.unattended = False
        for layer in self._paged:
            layer.columns = columns

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Sequence i becomes what sequence ``beam_idx[i]`` was."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the sequences ``indices``."""
        self._select(torch.arange(len(self.lengths), device=indices.device)[indices].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times."""
        self._select([s for s in range(len(self.lengths)) for _ in range(repeats)])

    def _select(self, indices: Sequence[int]) -> None:
        pairs = self.paging.sequences.select(indices)
        self.paging.step = None
        for layer in self._paged:
            if pairs and layer.pages is not None:
                ops.kv_copy(layer.pages, layer.pages, pairs)
