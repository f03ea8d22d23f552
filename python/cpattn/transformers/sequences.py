"""Which blocks the sequences of a cache have."""

from __future__ import annotations

from collections.abc import Sequence

from .._library import OutOfMemoryError


class Sequences:
    """Block tables of a batch on one of ``size`` ranks, which keep ``block_size`` tokens in a row in turn.

    The model gives columns, of which some tokens are none of a sequence: these fill the batch up.
    """

    def __init__(self, num_blocks: int, block_size: int, rank: int = 0, size: int = 1):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.rank, self.size = rank, size
        self.clear()

    def clear(self) -> None:
        """Forgets all sequences."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._kept: list[list[int]] = []  # of each sequence and column, 1 for a token of the sequence
        self.tables: list[list[int]] = []  # of each sequence, the blocks of the tokens that this rank keeps
        self.lengths: list[int] = []  # of each sequence, its tokens on all ranks

    def count(self, tokens: int) -> int:
        """How many of the first tokens of a sequence this rank keeps."""
        run = self.block_size
        rounds, rest = divmod(tokens, run * self.size)
        return rounds * run + min(max(rest - self.rank * run, 0), run)

    def append(self, kept: list[list[int]]) -> list[list[int]]:
        """Makes room for new columns, of which ``kept`` has 1 for each token of a sequence. For each of these the slot
        in the pools, or -1 where another rank keeps it. OutOfMemoryError, with nothing changed, where blocks lack."""
        if self.tables and len(kept) != len(self.tables):
            raise ValueError(f"cpattn: a batch of {len(kept)} on a cache of {len(self.tables)} sequences")
        lengths = [before + sum(new) for before, new in zip(self.lengths or [0] * len(kept), kept)]
        missing = [self._blocks(n) - len(table) for n, table in zip(lengths, self.tables or [[] for _ in kept])]
        self._need(sum(missing), f"sequences of {max(lengths)} tokens and less")
        if not self.tables:
            self.tables, self._kept, self.lengths = [[] for _ in kept], [[] for _ in kept], [0] * len(kept)
        slots, run = [], self.block_size
        for s, table in enumerate(self.tables):
            table.extend(self._free.pop() for _ in range(missing[s]))
            slots.append([self._slot(table, t) if t // run % self.size == self.rank else -1
                          for t in range(self.lengths[s], lengths[s])])
            self._kept[s].extend(kept[s])
        self.lengths = lengths
        return slots

    def _slot(self, table: list[int], position: int) -> int:
        block, offset = divmod(self.count(position), self.block_size)
        return table[block] * self.block_size + offset

    def _blocks(self, tokens: int) -> int:
        return -(-self.count(tokens) // self.block_size)

    def _need(self, blocks: int, what: str, freed: int = 0) -> None:
        left = len(self._free) + freed
        if blocks > left:
            raise OutOfMemoryError(f"cpattn: {what} need {blocks} more blocks; a cache of {self.num_blocks} blocks of "
                                   f"{self.block_size} tokens has {left} left")

    @property
    def columns(self) -> int:
        """How many columns the model has given."""
        return len(self._kept[0]) if self._kept else 0

    def crop(self, columns: int) -> None:
        """Takes away the last columns of all sequences."""
        for s, table in enumerate(self.tables):
            kept = self._kept[s]
            self.lengths[s] -= sum(kept[len(kept) - columns:])
            del kept[len(kept) - columns:]
            blocks = self._blocks(self.lengths[s])
            self._free.extend(table[blocks:])
            del table[blocks:]

    def select(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Sequence i becomes what sequence ``indices[i]`` was. The pairs of blocks to copy: of a sequence that is named
        again, all its blocks. OutOfMemoryError, with nothing changed, where blocks lack."""
        again = [s for i, s in enumerate(indices) if s in indices[:i]]
        gone = [block for s in set(range(len(self.tables))) - set(indices) for block in self.tables[s]]
        self._need(sum(len(self.tables[s]) for s in again), "copies of sequences", len(gone))
        self._free.extend(gone)
        tables: list[list[int]] = []
        pairs: list[tuple[int, int]] = []
        used: set[int] = set()
        for s in indices:
            table = self.tables[s]
            if s in used:
                table = [self._free.pop() for _ in table]
                pairs += zip(self.tables[s], table)
            used.add(s)
            tables.append(table)
        self.tables = tables
        self._kept = [list(self._kept[s]) for s in indices]
        self.lengths = [self.lengths[s] for s in indices]
        return pairs
