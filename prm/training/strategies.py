"""DeepSpeed on a machine without CUDA: what Lightning's strategy refuses there, made to run.

A recipe says `strategy: deepspeed_stage_2` and nothing else. On CUDA that is Lightning's own strategy; elsewhere it is
the subclass below, with DeepSpeed's CPU accelerator and gloo. ZeRO then shards the optimizer's state (and, from stage
2, the gradients) over the ranks just as it does on GPUs.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import nn

from prm.errors import UserError
from prm.extras import installed_version

log = logging.getLogger(__name__)
_STAGES = {"deepspeed": 2, "deepspeed_stage_1": 1, "deepspeed_stage_2": 2, "deepspeed_stage_3": 3}


class KeepDtypes(DeepSpeedPrecision):
    """Parameters stay in the dtypes they have: a frozen bfloat16 backbone below a float32 adapter and head.

    Lightning's own casts the whole module to one dtype, and lets DeepSpeed divide the loss by the number of
    accumulated batches, by which Lightning's loop has divided it already. Adam hides that; clipping by norm does not.
    """

    def __init__(self) -> None:
        super().__init__("32-true")

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, *args, scale_wrt_gas=False, **kwargs)


class DeepSpeedCPUStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy on CPU: three methods differ."""

    def setup_environment(self) -> None:
        # Past DeepSpeedStrategy's check for CUDA.
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        # Without the check that the ranks' device indices differ: there is one CPU device.
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        # DeepSpeed reads the index as the rank's device.
        return torch.device("cpu", 0)


def is_deepspeed(name: Any) -> bool:
    """True for the names of DeepSpeed strategies."""
    return isinstance(name, str) and name.startswith("deepspeed")


def deepspeed_strategy(name: str, *, cuda: bool, batch_size: int) -> DeepSpeedStrategy:
    """The strategy behind one of the names `deepspeed` (stage 2) and `deepspeed_stage_1`, `_2` and `_3`.

    Args:
        name: as in `--trainer.strategy`.
        cuda: whether the trainer runs on CUDA devices.
        batch_size: pairs per rank and step; DeepSpeed needs it for its throughput log alone.

    Raises:
        UserError: a name that is not one of these (offloading is not supported yet), or DeepSpeed is not
            installed.
    """
    if name not in _STAGES:
        raise UserError(f"trainer.strategy {name} is not supported: use {', '.join(sorted(_STAGES))} or ddp")
    if installed_version("deepspeed") is None:
        raise UserError("deepspeed is not installed: pip install 'prm-toolkit[train]', or use --trainer.strategy ddp")
    options: dict[str, Any] = {
        "stage": _STAGES[name],
        "logging_batch_size_per_gpu": batch_size,
        "precision_plugin": KeepDtypes(),
        "exclude_frozen_parameters": True,
        # Buckets are allocated whole, and Lightning's 200 million numbers are far more than an adapter has.
        "allgather_bucket_size": 20_000_000,
        "reduce_bucket_size": 20_000_000,
    }
    if cuda:
        return DeepSpeedStrategy(**options)
    # DeepSpeed chooses its accelerator when it is first imported, which is later than this.
    os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed compiles an operator with the `ninja` of PATH: the one that was installed beside it, also where the
    # environment is not activated. (Two ninjas in turn would compile it anew each time.)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    log.info("DeepSpeed ZeRO stage %d on CPU (gloo)", _STAGES[name])
    return DeepSpeedCPUStrategy(**options, process_group_backend="gloo", overlap_comm=False)


def partitioned_load(strategy: Any, *, bfloat16: bool) -> Any:
    """While the result lives, `from_pretrained` gives each rank its part of the weights (ZeRO stage 3).

    Raises:
        UserError: another strategy.
    """
    config = getattr(strategy, "config", None)
    if not isinstance(config, dict) or config.get("zero_optimization", {}).get("stage") != 3:
        raise UserError("model.load_partitioned needs --trainer.strategy deepspeed_stage_3")
    from transformers.integrations import HfDeepSpeedConfig

    # The dtype of what is loaded; the engine's own configuration has none, since dtypes are kept.
    return HfDeepSpeedConfig({**config, "bf16": {"enabled": bfloat16}})


def restore_rotary_buffers(model: nn.Module) -> None:
    """Rotary frequencies in float32 again, after a partitioned load in bfloat16.

    DeepSpeed's `zero.Init` makes every tensor of the load bfloat16, also the frequencies, which transformers computes
    in float32 and keeps so: rounded, they turn positions by other angles.
    """
    for module in model.modules():
        rounded = module._buffers.get("inv_freq")
        if rounded is not None and rounded.dtype != torch.float32:
            cls: Any = type(module)
            fresh = cls(module.config)
            for name, buffer in fresh.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(rounded.device)
