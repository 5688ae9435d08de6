"""Which pairs go into which batch of which rank.

Both samplers work on one global order of pairs cut into windows of `batch_size`: batch b of rank r is window
b * num_ranks + r. So N ranks see in one step exactly what one rank sees in N accumulated ones, and the place in an
epoch is a number of steps, whatever the number of ranks.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from torch.utils.data import Sampler

from prm.errors import UserError

#: Most steps whose pairs are sorted by length together.
STRETCH_STEPS = 50


class GroupedBatchSampler(Sampler[list[int]]):
    """Training batches: groups in an order that is new in every epoch, pairs of one group side by side.

    Pairs of one prompt share texts, so keeping them together lets a batch encode each text once. Groups are shuffled,
    then laid end to end and cut into batches, so a group may begin in one batch and end in the next. Every batch has
    `batch_size` pairs and every step the same number of batches, on all ranks: the pairs at the end of an epoch's order
    that do not fill one more step are left out of that epoch (`num_left_out`); other epochs leave out others.

    With `lengths`, groups of similar length share a step: the shuffled order is cut into stretches of many steps, each
    stretch is sorted by length, and its steps are shuffled again. All ranks then have about as much to do.

    Args:
        groups: group of each pair, length N; pairs with equal keys stay together.
        batch_size: pairs per rank and step.
        lengths: tokens of each pair, length N; None leaves the order as shuffled.
        rank, num_ranks: which share of every step this sampler yields.
        accumulate: batches a rank takes for one step of the optimizer.
        seed: of the shuffle, equal on all ranks.
        resume_at: (epoch, steps): that epoch begins after so many of its steps. `len` does not change.

    Raises:
        UserError: fewer pairs than one step needs.
    """

    def __init__(
        self,
        groups: Sequence[Hashable],
        batch_size: int,
        *,
        lengths: Sequence[int] | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        accumulate: int = 1,
        seed: int = 0,
        resume_at: tuple[int, int] = (0, 0),
    ) -> None:
        _check(batch_size, rank, num_ranks)
        members: dict[Hashable, list[int]] = defaultdict(list)
        for index, group in enumerate(groups):
            members[group].append(index)
        self._members = list(members.values())
        self.batch_size = batch_size
        self.rank, self.num_ranks, self.seed = rank, num_ranks, seed
        self.accumulate, self.resume_at = accumulate, resume_at
        #: Longest pair of each pair's group.
        self._length_of: dict[int, int] = {}
        if lengths is not None:
            self._length_of = {i: max(lengths[j] for j in group) for group in self._members for i in group}
        self.epoch = 0
        self._length = len(groups) // (batch_size * num_ranks * accumulate) * accumulate
        if self._length == 0:
            raise UserError(
                f"{len(groups)} pairs do not fill one step of {batch_size} x {num_ranks} x {accumulate} "
                "(data.batch_size x ranks x trainer.accumulate_grad_batches): lower data.batch_size"
            )
        self.num_left_out = len(groups) - self._length * batch_size * num_ranks

    @property
    def sampler(self) -> GroupedBatchSampler:
        """Itself: Lightning looks for `set_epoch` on the sampler of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of an epoch (Lightning calls this before each)."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._length

    @property
    def pairs_per_step(self) -> int:
        """Pairs of all ranks and accumulated batches in one step of the optimizer."""
        return self.batch_size * self.num_ranks * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        epoch, steps = self.resume_at
        for batch in range(steps * self.accumulate if epoch == self.epoch else 0, self._length):
            start = (batch * self.num_ranks + self.rank) * self.batch_size
            yield order[start : start + self.batch_size]

    def _order(self) -> list[int]:
        """The pairs of this epoch, all ranks' together."""
        # A string seeds Python's generator the same way on every machine and in every process.
        generator = random.Random(f"{self.seed}/{self.epoch}")
        groups = [list(group) for group in self._members]
        generator.shuffle(groups)
        for group in groups:
            generator.shuffle(group)
        # What is left out is decided before sorting, or it would always be the longest.
        total = self._length * self.num_ranks * self.batch_size
        if not self._length_of:
            return [index for group in groups for index in group][:total]
        return self._bucketed(groups, total, generator)

    def _bucketed(self, groups: list[list[int]], total: int, generator: random.Random) -> list[int]:
        steps = total // self.pairs_per_step
        stretch = min(max(1, steps // 4), STRETCH_STEPS) * self.pairs_per_step
        order: list[int] = []
        pool: list[list[int]] = []
        left = total
        for group in groups:
            pool.append(group[:left])
            left -= len(pool[-1])
            if left and sum(map(len, pool)) < stretch:
                continue
            # A stretch ends with a whole step, so a group may go on in the next stretch.
            pool.sort(key=lambda g: -self._length_of[g[0]])
            flat = [index for g in pool for index in g]
            whole = len(flat) // self.pairs_per_step * self.pairs_per_step
            windows = [flat[i : i + self.pairs_per_step] for i in range(0, whole, self.pairs_per_step)]
            generator.shuffle(windows)
            order += [index for window in windows for index in window]
            pool = [flat[whole:]] if flat[whole:] else []
            if not left:
                break
        return order


class CoveringBatchSampler(Sampler[list[int]]):
    """Evaluation batches: every pair at least once over all ranks, pairs of one group side by side, no shuffle.

    All ranks yield the same number of batches, none empty (sharded models run their forwards together). Batches differ
    in size by at most one pair; only with fewer pairs than batches are some repeated, which metrics over unique sample
    ids do not notice.

    Args:
        groups: group of each pair, length N.
        batch_size: most pairs per batch.
        rank, num_ranks: which share this sampler yields.
    """

    def __init__(self, groups: Sequence[Hashable], batch_size: int, *, rank: int = 0, num_ranks: int = 1) -> None:
        _check(batch_size, rank, num_ranks)
        if not groups:
            raise UserError("there are no pairs to evaluate on: build the dataset with more pairs for each user")
        members: dict[Hashable, list[int]] = defaultdict(list)
        for index, group in enumerate(groups):
            members[group].append(index)
        self._order = [index for group in members.values() for index in group]
        self.rank, self.num_ranks = rank, num_ranks
        self._length = -(-len(groups) // (batch_size * num_ranks))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        total, windows = len(self._order), self._length * self.num_ranks
        for step in range(self._length):
            window = step * self.num_ranks + self.rank
            start, end = window * total // windows, (window + 1) * total // windows
            yield self._order[start:end] or [self._order[window % total]]


def _check(batch_size: int, rank: int, num_ranks: int) -> None:
    if batch_size < 1:
        raise UserError(f"a batch size of {batch_size} is too small: use 1 or more")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank {rank} of {num_ranks}")
