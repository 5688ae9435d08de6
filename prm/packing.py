"""Several token sequences as few rows: shared prefixes once, rows filled up, and a mask that keeps branches apart.

A prompt with its responses, or a user's long context with all its prompts, is a tree: sequences that begin alike share
those tokens, and part where they differ. Each tree is laid out in one row in preorder, so a token's descendants are the
columns right after it. One number a token then says everything about attention: `visible_until`, the column where its
subtree ends. Query i attends to key j where

    j <= i < visible_until[j]

which is: j is i itself or one of its ancestors. Position ids restart after the shared part, so the hidden states are
those of separate forwards. Trees side by side in one row (packing) and padding need nothing further: a tree's tokens
are not visible beyond its end, and a padding token sees itself alone.

Only causal models can be run this way: a bidirectional encoder's prompt would have to see each response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("packed", "shared")


@dataclass
class Tree:
    """Sequences that share their beginnings, in preorder. Columns are counted from the tree's start.

    Attributes:
        ids, positions, until: token id, position id and `visible_until` of each of its K columns.
        ends: column of each sequence's last token, by the sequence's number.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    until: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    path: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, number: int, sequence: Sequence[int], shared: int) -> None:
        """Append a sequence whose first `shared` tokens are those of the sequence added last."""
        self._close(shared)
        for position in range(shared, len(sequence)):
            self.path.append(len(self.ids))
            self.ids.append(sequence[position])
            self.positions.append(position)
            self.until.append(0)
        self.ends[number] = self.path[-1]

    def _close(self, depth: int) -> None:
        """End the subtrees of all tokens on the path below `depth`."""
        for column in self.path[depth:]:
            self.until[column] = len(self.ids)
        del self.path[depth:]

    def closed(self) -> Tree:
        """The tree with all its subtrees ended."""
        self._close(0)
        return self


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    low, high = 0, length
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low


def trees(
    sequences: Sequence[tuple[int, ...]], *, share: bool = True, min_shared: float = 0.5, row_tokens: int = 2048
) -> list[Tree]:
    """Sequences as trees.

    Args:
        sequences: M token sequences, none empty. Equal ones become one path.
        share: False makes each sequence a tree of its own.
        min_shared: two sequences join when they share at least this part of the shorter one. What is shared is computed
            once, but a longer row costs attention, which the mask does not save on every device.
        row_tokens: a tree that would grow beyond this is cut in two, and the shared part repeated.

    Raises:
        ValueError: an empty sequence.
    """
    if not all(sequences):
        raise ValueError("a sequence is empty: there is no token to read a feature from")
    found: list[Tree] = []
    last: tuple[int, ...] = ()
    for number in sorted(range(len(sequences)), key=lambda n: sequences[n]) if share else range(len(sequences)):
        sequence = sequences[number]
        shared = common_prefix(last, sequence) if share and found else 0
        joins = shared and shared >= min_shared * min(len(last), len(sequence))
        if not joins or len(found[-1]) + len(sequence) - shared > row_tokens:
            found.append(Tree())
            shared = 0
        found[-1].add(number, sequence, shared)
        last = sequence
    return [tree.closed() for tree in found]


def fill_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of the items of each row of `capacity` columns: first fit, the longest first."""
    rows: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        for row, left in enumerate(room):
            if lengths[item] <= left:
                rows[row].append(item)
                room[row] -= lengths[item]
                break
        else:
            rows.append([item])
            room.append(capacity - lengths[item])
    return rows


def pack(
    sequences: Sequence[tuple[int, ...]],
    pad_id: int,
    *,
    layout: str = "shared",
    min_shared: float = 0.5,
    row_tokens: int = 2048,
    multiple_of: int = 1,
) -> dict[str, Tensor]:
    """M token sequences as R rows of T columns.

    Args:
        sequences: the sequences.
        pad_id: id of padding columns; any will do.
        layout: "packed" fills rows with whole sequences, "shared" with trees.
        min_shared, row_tokens: see `trees`.
        multiple_of: T is rounded up to it; kernels compiled for each width then see few of them.

    Returns:
        input_ids, position_ids, visible_until [R, T]; row, column [M], where each sequence's last token stands.

    Example:
        >>> batch = pack([(5, 6, 7), (5, 6, 8, 9)], pad_id=0)
        >>> batch["input_ids"].tolist(), batch["position_ids"].tolist(), batch["visible_until"].tolist()
        ([[5, 6, 7, 8, 9]], [[0, 1, 2, 2, 3]], [[5, 5, 3, 5, 5]])
        >>> batch["column"].tolist()
        [2, 4]
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: one of {', '.join(LAYOUTS)} is needed")
    found = trees(sequences, share=layout == "shared", min_shared=min_shared, row_tokens=row_tokens)
    lengths = [len(tree) for tree in found]
    width = -(-max(lengths) // multiple_of) * multiple_of
    rows = fill_rows(lengths, width)
    input_ids = torch.full((len(rows), width), pad_id)
    position_ids = torch.zeros((len(rows), width), dtype=torch.long)
    visible_until = torch.arange(1, width + 1).repeat(len(rows), 1)
    place = torch.zeros((len(sequences), 2), dtype=torch.long)
    for row, members in enumerate(rows):
        start = 0
        for number in members:
            tree = found[number]
            columns = slice(start, start + len(tree))
            input_ids[row, columns] = torch.tensor(tree.ids)
            position_ids[row, columns] = torch.tensor(tree.positions)
            visible_until[row, columns] = torch.tensor(tree.until) + start
            for sequence, column in tree.ends.items():
                place[sequence, 0], place[sequence, 1] = row, start + column
            start += len(tree)
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "visible_until": visible_until,
        "row": place[:, 0].contiguous(),
        "column": place[:, 1].contiguous(),
    }


def attention_mask(visible_until_rt: Tensor, position_rt: Tensor | None = None, window: int | None = None) -> Tensor:
    """Boolean mask [R, 1, T, T] of rows: True where the query (third axis) attends to the key (fourth).

    Args:
        visible_until_rt: from `pack`.
        position_rt: position ids, needed with a window.
        window: of sliding attention: keys `window` or more positions back are hidden.
    """
    columns = torch.arange(visible_until_rt.shape[1], device=visible_until_rt.device)
    mask = (columns[None, None, :] <= columns[None, :, None]) & (columns[None, :, None] < visible_until_rt[:, None, :])
    if window is not None:
        assert position_rt is not None
        mask = mask & (position_rt[:, :, None] - position_rt[:, None, :] < window)
    return mask[:, None]


def block_mask(visible_until_rt: Tensor, position_rt: Tensor | None = None, window: int | None = None) -> Any:
    """The same mask for FlexAttention, which skips the blocks where nothing is visible."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k <= q) & (q < visible_until_rt[b, k])
        if window is not None:
            assert position_rt is not None
            seen = seen & (position_rt[b, q] - position_rt[b, k] < window)
        return seen

    rows, width = visible_until_rt.shape
    device = visible_until_rt.device
    return create_block_mask(visible, rows, None, width, width, device=device, _compile=device.type == "cuda")


def flex_problem(device: torch.device) -> str | None:
    """Why FlexAttention cannot be used on a device; None when it gives what plain attention gives, gradients too."""
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    if device.type != "cuda":
        return "FlexAttention trains on CUDA devices alone"
    # Widths are rounded, so there is a handful of them; torch's own limit of eight would end in its slow fallback.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    generator = torch.Generator().manual_seed(0)
    sequences = [tuple(range(n)) for n in (90, 70, 40)] + [(*range(60), 200, 201)]
    until = pack(sequences, 0, multiple_of=128)["visible_until"].to(device)
    shape = (3, len(until), 2, until.shape[1], 64)
    draws = [torch.randn(shape, generator=generator).to(device) for _ in range(2)]
    results = []
    try:
        for flex in (False, True):
            query, key, value = (x.clone().requires_grad_(True) for x in draws[0])
            if flex:
                out = torch.compile(flex_attention)(query, key, value, block_mask=block_mask(until))
            else:
                out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask(until))
            (out * draws[1][0]).sum().backward()
            results.append([out.detach(), query.grad, key.grad, value.grad])
    except Exception as error:  # the compiler fails in many ways
        return (
            f"FlexAttention does not run here ({(str(error).strip().splitlines() or [type(error).__name__])[0][:150]})"
        )
    gap = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*results, strict=True))
    return None if gap < 2e-2 else f"FlexAttention differs from plain attention by {gap:.2g} here"
