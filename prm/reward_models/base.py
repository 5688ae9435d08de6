"""What all feature rewards share: r_u(x, y) = g(h(x, y); theta, z_u).

h is the backbone's feature, theta the head's shared parameters, z_u the user's state. The head never sees the
backbone, so one forward of the backbone serves every user and every method.

A reward is computed in two steps. `project` takes what does not depend on the user, and is done once for a text;
`projected_scores` adds the user, by broadcasting, so one definition serves rows of (text, user), all users by all
texts, and padded blocks of users by their own texts.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from prm.losses import bradley_terry


class FeatureReward(nn.Module):
    """Base of the feature rewards. A method says how users start, how they score, and how new users are adapted.

    A method defines `projected_scores`, or, when its reward is a weighted sum of P quantities that do not depend on
    the user, sets `linear` and defines `project` and `mixing` alone.

    Args:
        feature_dim: d, width of the backbone feature; the first argument of every method.

    Attributes:
        user_dim: Z, width of a user's state z_u; 0 means that the method does not look at the user.
        context_pairs: most annotated pairs from which the method encodes a user; 0: users have states of their own,
            which are trained.
    """

    user_dim: int = 0
    context_pairs: int = 0
    #: The reward is mixing(z_u) . project(h): new users are then fitted by Newton steps.
    linear: ClassVar[bool] = False
    #: The head's input is [h(x, y); h(x)], the prompt's own feature behind the response's: 2 d numbers.
    reads_prompt: ClassVar[bool] = False
    #: The only pooling that the method is defined for; None takes any.
    required_pooling: ClassVar[str | None] = None
    #: Precision (inverse variance) of the Gaussian prior around the start that adaptation uses unless told otherwise.
    adaptation_precision: ClassVar[float] = 0.0
    #: Learning rate of Adam in adaptation unless told otherwise.
    adaptation_lr: ClassVar[float] = 0.1

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        self.feature_dim = feature_dim

    @property
    def input_dim(self) -> int:
        """Width of the head's input: d, or 2 d for a method that reads the prompt."""
        return self.feature_dim * (2 if self.reads_prompt else 1)

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments, as a checkpoint stores them: each is kept under its own name."""
        return {
            name: getattr(self, name) for name in inspect.signature(type(self).__init__).parameters if name != "self"
        }

    # Users

    def initial_users(self, num_users: int, generator: torch.Generator) -> Tensor:
        """States [U, Z] that training starts from."""
        return torch.zeros(num_users, self.user_dim)

    def new_users(self, num_users: int, trained_uz: Tensor) -> Tensor:
        """States [num_users, Z] that adaptation starts from: the mean of the training users' states."""
        if len(trained_uz) == 0:
            return torch.zeros(num_users, self.user_dim)
        return trained_uz.float().mean(0, keepdim=True).repeat(num_users, 1)

    def prior_precision(self, trained_uz: Tensor) -> Tensor | float:
        """Precision of adaptation's Gaussian prior around the start: a number, or a matrix [Z, Z]."""
        return self.adaptation_precision

    def finished(self, states_uz: Tensor) -> tuple[FeatureReward, Tensor]:
        """The head and the users' states [U, Z'] as a checkpoint keeps them, of a trained head and its users' states.

        A method whose result is another function than the one it trained (an average over users) returns that.
        """
        return self, states_uz

    def resting(self, step: int) -> frozenset[str]:
        """Which of "adapter", "head" and "users" keep still in an optimizer step: for methods that alternate."""
        return frozenset()

    # Rewards

    def forward(self, part: str, *args: Any) -> Any:
        """A method of this class, by name: strategies that shard parameters gather them around a module's forward."""
        return getattr(self, part)(*args)

    def project(self, inputs_nd: Tensor) -> Tensor:
        """What the reward takes from its inputs [.., input_dim] whoever the user is: [.., P]."""
        return inputs_nd

    def mixing(self, users_z: Tensor) -> Tensor:
        """Weights [.., P] of a linear method's projected inputs, of users' states [.., Z]."""
        raise NotImplementedError

    def mixing_jacobian(self, users_uz: Tensor) -> Tensor:
        """d mixing / d z of a linear method: [U, P, Z] for states [U, Z]."""
        raise NotImplementedError

    def mixing_curvature(self, users_uz: Tensor, weight_up: Tensor) -> Tensor | None:
        """Second derivative [U, Z, Z] of weight . mixing(z), for weights [U, P]; None where mixing is linear in z."""
        return None

    def projected_scores(self, projected_p: Tensor, users_z: Tensor) -> Tensor:
        """Rewards [..] of projected inputs [.., P] for states [.., Z]; the dimensions before the last broadcast."""
        assert self.linear, f"{type(self).__name__} defines projected_scores"
        return (self.mixing(users_z) * projected_p).sum(-1)

    def scores(self, inputs_nd: Tensor, user_nz: Tensor) -> Tensor:
        """Rewards [N] of inputs [N, input_dim], each for the user whose state is the same row of [N, Z]."""
        return self.projected_scores(self.project(inputs_nd), user_nz)

    def scores_for_all(self, inputs_nd: Tensor, users_uz: Tensor) -> Tensor:
        """Rewards [U, N] of every input for every user."""
        projected = self.project(inputs_nd)
        if self.linear:
            return self.mixing(users_uz) @ projected.T
        return self.projected_scores(projected[None], users_uz[:, None])

    # Losses

    def pair_loss(self, delta_n: Tensor, weight_n: Tensor | None = None) -> Tensor:
        """Loss (scalar) of reward differences [N], in training and adaptation: Bradley-Terry, or a method's own."""
        return bradley_terry(delta_n, weight_n)

    def loss(self, chosen_nd: Tensor, rejected_nd: Tensor, user_nz: Tensor, weight_n: Tensor | None = None) -> Tensor:
        """Training loss (scalar) of pairs of inputs [N, input_dim] with users' states [N, Z]."""
        return self.pair_loss(self.scores(chosen_nd, user_nz) - self.scores(rejected_nd, user_nz), weight_n)
