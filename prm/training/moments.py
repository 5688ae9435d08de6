"""AdamW's moments of every trainable parameter, whole, whatever shards them.

Without DeepSpeed they stand in the optimizer by parameter. ZeRO keeps them in flat partitions, one a rank and group:
stages 1 and 2 link each parameter to its fragment of its group's partition, stage 3 partitions each parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning import Trainer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def _trainable(module: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def _is_partitioned(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id")


def gather_moments(trainer: Trainer, module: torch.nn.Module) -> dict[str, Tensor]:
    """Moments on the CPU in float32 by `exp_avg/NAME` and `exp_avg_sq/NAME`; every rank must call this.

    A parameter that has had no gradient yet has none, and zeros stand for them.
    """
    found = {}
    _link_fragments(trainer.optimizers[0])
    for name, parameter in _trainable(module):
        for key in MOMENTS:
            if _is_partitioned(parameter) or hasattr(parameter, "_hp_mapping"):
                from deepspeed.utils import safe_get_full_optimizer_state

                value = safe_get_full_optimizer_state(parameter, key)
            else:
                value = trainer.optimizers[0].state.get(parameter, {}).get(key, torch.zeros_like(parameter))
            assert value.numel() == getattr(parameter, "ds_numel", parameter.numel()), f"{name} was not gathered"
            shape = getattr(parameter, "ds_shape", parameter.shape)
            found[f"{key}/{name}"] = value.detach().float().cpu().reshape(shape).clone()
    return found


def restore_moments(trainer: Trainer, module: torch.nn.Module, moments: dict[str, Tensor], step: int) -> None:
    """Put gathered moments into a fresh optimizer, as if it had made `step` steps; every rank must call this."""
    optimizer: Any = trainer.optimizers[0]
    trainable = _trainable(module)
    expected = {f"{key}/{name}" for name, _ in trainable for key in MOMENTS}
    assert set(moments) == expected, f"moments of other parameters: {sorted(set(moments) ^ expected)[:4]}"
    flat = _flat_partitions(optimizer)
    if flat is None:
        for name, parameter in trainable:
            state = {key: moments[f"{key}/{name}"].to(parameter.device).clone() for key in MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **state}
        return
    # ZeRO's optimizer makes its states at its first step.
    for partition in flat:
        optimizer.optimizer.state[partition] = {
            "step": torch.tensor(float(step)),
            **{key: torch.zeros_like(partition) for key in MOMENTS},
        }
    _link_fragments(optimizer)
    for name, parameter in trainable:
        for key in MOMENTS:
            _set_moment(parameter, moments[f"{key}/{name}"], key)


def _flat_partitions(optimizer: Any) -> list[Tensor] | None:
    """ZeRO's flat float32 partitions of this rank; None for a plain optimizer."""
    for attribute in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, attribute):
            return list(getattr(optimizer, attribute))
    return None


def _link_fragments(optimizer: Any) -> None:
    """Link parameters to their fragments of the moments (stages 1 and 2).

    DeepSpeed does so once, when the first group of parameters has made its first step and the others have no moments.
    """
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

        for group, partition in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
            lazy_init_hp_params_optimizer_state(group, partition, optimizer.optimizer.state)


def _set_moment(parameter: Any, value: Tensor, key: str) -> None:
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    if not _is_partitioned(parameter):
        safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)
        return
    # The setter of whole values cannot cut one whose size is no multiple of the ranks.
    import deepspeed.comm as comm

    size = parameter.partition_numel()
    padded = torch.nn.functional.pad(value.flatten(), (0, size * comm.get_world_size() - value.numel()))
    own = padded.narrow(0, size * comm.get_rank(), size)
    safe_set_local_optimizer_state(parameter, own.to(parameter.device), key)
