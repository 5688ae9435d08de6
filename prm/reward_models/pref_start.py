"""Where PReF's training starts: a factorization of the training users' choices.

A pair is unordered, so it is oriented by a hash of its two texts, and a choice is 1 for the first text and 0 for the
second: chosen-first pairs would make the matrix all ones. (arXiv 2512.23067, appendix D, for pointwise rewards.)

A choice a in {0, 1} is read as a linear probability: sigma(x) is about 1/2 + x / 4, so reward differences start at
4 (a - 1/2) as far as the factors explain them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Rounds of filling missing cells by the factors and factorizing again.
ROUNDS = 30


@dataclass(frozen=True)
class PairCells:
    """Choices of users between oriented, distinct pairs of texts: the observed cells of a matrix [pairs, users].

    Attributes:
        num_pairs, num_users: P, U.
        pair, user: place of each of the C cells, [C].
        choice: mean choice of the cell's user, [C]: 1 the first text, 0 the second, between them when the user was
            asked several times.
    """

    num_pairs: int
    num_users: int
    pair: Tensor
    user: Tensor
    choice: Tensor

    @property
    def overlap(self) -> float:
        """Mean number of users who judged a pair."""
        return len(self.pair) / max(1, self.num_pairs)


def first_of(one: str, other: str) -> str:
    """The text of a pair that comes first in its orientation, by a hash that no label enters."""
    return min(one, other, key=lambda text: (hashlib.sha256(text.encode()).hexdigest(), text))


@dataclass(frozen=True)
class Start:
    """What training starts from, and what is known of it.

    Attributes:
        weight: W, [J, d].
        users: u, [U, J].
        explained_variance: of the held-out cells, 1 - sum (a - prediction)^2 / sum (a - 1/2)^2: 0 says nothing is
            explained, and it can be negative.
        fitted_variance: of the cells that were fitted, which says little.
    """

    weight: Tensor
    users: Tensor
    explained_variance: float
    fitted_variance: float


def svd_start(
    cells: PairCells, difference_pd: Tensor, num_factors: int, *, ridge: float = 1e-2, seed: int = 0
) -> Start:
    """Start by the truncated SVD of the choices.

    1. A, [P, U]: choice - 1/2 where observed. Missing cells are filled by the factors' own values, in rounds that
       begin with 0 (hard imputation at rank J; Mazumder et al. 2010, section 6, without shrinkage).
    2. A ~ U S V^T of rank J; pair features U sqrt(S), users V sqrt(S).
    3. W by ridge least squares W e ~ pair feature, e = h(first) - h(second).

    Args:
        cells: the choices.
        difference_pd: e, [P, d].
        num_factors: J.
        ridge: of step 3, in units of the mean squared singular value of e.
        seed: which tenth of the cells is held out.
    """

    def fit(kept: Tensor) -> tuple[Tensor, Tensor]:
        pair_pj, user_uj = _factors(cells, kept, num_factors)
        return _ridge(difference_pd.double(), pair_pj, ridge).T, user_uj

    return _with_held_out(cells, difference_pd, fit, seed)


def feature_svd_start(
    cells: PairCells, difference_pd: Tensor, num_factors: int, *, ridge: float = 1e-2, seed: int = 0
) -> Start:
    """Start by the SVD of one ridge fit a user: it needs no pair that two users have judged.

    Each user's choices - 1/2 are regressed on e; the stacked vectors [U, d] = U S V^T at rank J give users U sqrt(S)
    and W = sqrt(S) V^T. Arguments as for `svd_start`; the ridge is that of each user's fit.
    """

    def fit(kept: Tensor) -> tuple[Tensor, Tensor]:
        e_pd = difference_pd.double()
        vectors = torch.zeros(cells.num_users, e_pd.shape[1], dtype=torch.double)
        order = torch.argsort(cells.user[kept], stable=True)
        rows = kept[order]
        counts = torch.bincount(cells.user[kept], minlength=cells.num_users).tolist()
        for user, mine in enumerate(rows.split(counts)):
            if len(mine):
                vectors[user] = _ridge(e_pd[cells.pair[mine]], (cells.choice[mine].double() - 0.5)[:, None], ridge)[
                    :, 0
                ]
        u, s, vt = torch.linalg.svd(vectors, full_matrices=False)
        u, s, vt = _padded(u, s, vt, num_factors)
        return s.sqrt()[:, None] * vt, u * s.sqrt()

    return _with_held_out(cells, difference_pd, fit, seed)


def _padded(u: Tensor, s: Tensor, vt: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The leading `rank` triples, with zeros where there are fewer."""
    u, s, vt = u[:, :rank], s[:rank], vt[:rank]
    lack = rank - len(s)
    if lack:
        u = torch.cat([u, u.new_zeros(len(u), lack)], 1)
        s = torch.cat([s, s.new_zeros(lack)])
        vt = torch.cat([vt, vt.new_zeros(lack, vt.shape[1])])
    return u, s, vt


def _factors(cells: PairCells, kept: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Pair features [P, J] and users [U, J] of the choices, less a half."""
    pair, user = cells.pair[kept], cells.user[kept]
    value = cells.choice[kept].double() - 0.5
    matrix = torch.zeros(cells.num_pairs, cells.num_users, dtype=torch.double)
    complete = len(kept) == matrix.numel()
    with torch.random.fork_rng(devices=[]):
        # svd_lowrank draws its test matrix.
        torch.manual_seed(0)
        for round_number in range(1 if complete else ROUNDS):
            matrix[pair, user] = value
            if min(matrix.shape) <= 4 * rank:
                u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
            else:
                u, s, v = torch.svd_lowrank(matrix, q=min(rank + 6, *matrix.shape), niter=3)
                vt = v.T
            u, s, vt = _padded(u, s, vt, rank)
            if round_number < ROUNDS - 1:
                torch.matmul(u * s, vt, out=matrix)
    return u * s.sqrt(), vt.T * s.sqrt()


def _ridge(x_nd: Tensor, y_nk: Tensor, ridge: float) -> Tensor:
    """[d, k] of ridge least squares without a bias, in the smaller of its two forms."""
    rows, width = x_nd.shape
    strength = ridge * x_nd.square().sum() / max(1, min(rows, width)) + 1e-12
    if rows < width:
        gram = x_nd @ x_nd.T
        return x_nd.T @ torch.linalg.solve(gram + strength * torch.eye(rows, dtype=gram.dtype), y_nk)
    gram = x_nd.T @ x_nd
    return torch.linalg.solve(gram + strength * torch.eye(width, dtype=gram.dtype), x_nd.T @ y_nk)


def _with_held_out(
    cells: PairCells, difference_pd: Tensor, fit: Callable[[Tensor], tuple[Tensor, Tensor]], seed: int
) -> Start:
    """Fit nine tenths of the cells to learn what the rest says of the factors, then fit all."""
    order = torch.randperm(len(cells.pair), generator=torch.Generator().manual_seed(seed))
    held, kept = order[: len(order) // 10], order[len(order) // 10 :]

    def explained(weight: Tensor, users: Tensor, rows: Tensor) -> float:
        if not len(rows):
            return float("nan")
        target = cells.choice[rows].double() - 0.5
        features = difference_pd[cells.pair[rows]].double() @ weight.T
        rest = (target - (features * users[cells.user[rows]]).sum(-1)).square().sum()
        total = target.square().sum()
        return float(1 - rest / total) if total > 0 else float("nan")

    part = fit(kept.sort().values)
    held_out = explained(part[0], part[1], held)
    everything = torch.arange(len(order))
    weight, users = fit(everything)
    # From probabilities to logits, half of the factor on each side.
    return Start((2 * weight).float(), (2 * users).float(), held_out, explained(weight, users, everything))
