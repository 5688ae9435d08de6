"""MPU: a reward network for every user, and the average of all of them for new users."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from prm.errors import UserError
from prm.reward_models.base import FeatureReward


class MPU(FeatureReward):
    """Model per user: r_u(x, y) = MLP_u(h), a whole network of one hidden layer for each user.

    r_u = b . relu(A h + a),  z_u = (A: [width, d], a: [width], b: [width]); without an output bias, which differences
    do not see. (arXiv 2512.23067, section 6.2, "MPU": -log sigma on the user's own pairs.)

    All users' networks are rows of one tensor [U, width (d + 2)] and are computed by batched products. All start from
    one network, which the checkpoint keeps: a new user's network starts there too, and its prior is centred there.

    Nothing is shared but the start, so a user's network knows the user's pairs alone.

    Args:
        feature_dim: d, width of the backbone feature.
        width: hidden units of each network.
    """

    adaptation_precision: ClassVar[float] = 1.0
    adaptation_lr: ClassVar[float] = 0.01

    def __init__(self, feature_dim: int, width: int = 32) -> None:
        super().__init__(feature_dim)
        if width < 1:
            raise UserError(f"width is {width}: 1 or more is needed")
        self.width = width
        self.user_dim = width * (feature_dim + 2)
        self.start: Tensor
        self.register_buffer("start", self._random_network())

    def _random_network(self) -> Tensor:
        """One network [Z] at PyTorch's own start of linear layers: uniform within 1 / sqrt(inputs)."""
        first = (2 * torch.rand(self.width * (self.feature_dim + 1)) - 1) / self.feature_dim**0.5
        last = (2 * torch.rand(self.width) - 1) / self.width**0.5
        return torch.cat([first, last])

    def initial_users(self, num_users: int, generator: torch.Generator) -> Tensor:
        """The same network for everybody."""
        if not self.user_dim:
            return torch.zeros(num_users, 0)
        start = self.start if not self.start.is_meta else torch.zeros(self.user_dim)
        return start.detach().cpu().repeat(num_users, 1)

    def new_users(self, num_users: int, trained_uz: Tensor) -> Tensor:
        """The network that all began with, and not a mean of others' networks: that is MPUAvg."""
        return self.start.detach().repeat(num_users, 1)

    def networks(self, users_z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A [.., d, width], a [.., width] and b [.., width] of states [.., Z]."""
        inner = self.feature_dim * self.width
        first, bias, last = users_z.split([inner, self.width, self.width], -1)
        return first.unflatten(-1, (self.feature_dim, self.width)), bias, last

    def projected_scores(self, projected_p: Tensor, users_z: Tensor) -> Tensor:
        first, bias, last = self.networks(users_z)
        if users_z.ndim > 1 and users_z.shape[-2] == 1:
            # One network for a whole block of texts: a product of matrices, and no copy of the network for each text.
            hidden = projected_p @ first.squeeze(-3)
        else:
            hidden = torch.einsum("...d,...dh->...h", projected_p, first)
        return ((hidden + bias).relu() * last).sum(-1)


class MPUAvg(MPU):
    """The average of the training users' networks, for everybody.

    It trains as MPU does. What it leaves is one reward for all users: of the network whose parameters are the mean of
    theirs, or the mean of their networks' rewards. The mean of parameters makes sense because all start from one
    network. (arXiv 2512.23067, section 6.2, "MPU-Avg", which does not say which; both are here by name.)

    The accuracies logged in training are those of the users' own networks; `prm evaluate` measures the average.

    Args:
        feature_dim: d, width of the backbone feature.
        width: hidden units of each network.
        average: parameters or scores.
        members: networks in a checkpoint, whose average it is; 0 while they are trained.
    """

    AVERAGES: ClassVar[tuple[str, ...]] = ("parameters", "scores")

    def __init__(self, feature_dim: int, width: int = 32, average: str = "parameters", members: int = 0) -> None:
        super().__init__(feature_dim, width)
        if average not in self.AVERAGES:
            raise UserError(f"average {average!r} is not known to MPUAvg: use one of {', '.join(self.AVERAGES)}")
        self.average, self.members = average, members
        if members:
            self.member_states = nn.Parameter(torch.zeros(members, self.user_dim))
            self.user_dim = 0

    def new_users(self, num_users: int, trained_uz: Tensor) -> Tensor:
        return torch.zeros(num_users, 0) if self.members else super().new_users(num_users, trained_uz)

    def finished(self, states_uz: Tensor) -> tuple[FeatureReward, Tensor]:
        """The average as a head of its own, and users without states."""
        if self.members:
            return self, states_uz
        kept = states_uz.mean(0, keepdim=True) if self.average == "parameters" else states_uz
        head = type(self)(self.feature_dim, self.width, self.average, len(kept))
        head.start.copy_(self.start)
        head.member_states.data.copy_(kept.detach())
        return head.train(self.training), states_uz[:, :0]

    def projected_scores(self, projected_p: Tensor, users_z: Tensor) -> Tensor:
        if not self.members:
            return super().projected_scores(projected_p, users_z)
        first, bias, last = self.networks(self.member_states)
        hidden = torch.einsum("...d,mdh->...mh", projected_p, first)
        scores = ((hidden + bias).relu() * last).sum(-1).mean(-1)
        return scores.expand(torch.broadcast_shapes(scores.shape, users_z.shape[:-1]))
