"""Started by torchrun: train reward models under DDP and write the loss of every step, as the mean over the ranks.

two_ranks.py OUT.json DATA BACKBONE '{"prm.reward_models.lore.LoRE": {"num_bases": 3}}'
"""

import importlib
import json
import sys
from pathlib import Path

import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

from data_modules.preference_data import PreferenceDataModule
from prm.backbones import LoraSpec
from prm.training.callbacks import full_state
from prm.training.module import RewardModelModule


class Losses(Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.steps.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))


def train(path, arguments, data, backbone):
    seed_everything(0, verbose=False)
    module_name, name = path.rsplit(".", 1)
    method = getattr(importlib.import_module(module_name), name)
    module = RewardModelModule(
        backbone, lambda d: method(d, **arguments), lora=LoraSpec(r=4, alpha=8), dtype="float32",
        adapter_lr=1e-3, head_lr=1e-2, user_lr=1e-1,
    )  # fmt: skip
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False, max_steps=6,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0,
        callbacks=[losses], val_check_interval=6,
    )  # fmt: skip
    trainer.fit(module, datamodule=PreferenceDataModule(data, backbone, batch_size=4, max_length=96, dtype="float32"))
    figures = {k: float(v) for k, v in trainer.callback_metrics.items() if k != "train/loss"}
    weights = {k: v.flatten().tolist() for k, v in full_state(module).items() if not k.startswith("backbone.")}
    return {"losses": losses.steps, "figures": figures, "weights": weights}, trainer.is_global_zero


if __name__ == "__main__":
    out, data, backbone, methods = sys.argv[1:]
    results = {}
    for path, arguments in json.loads(methods).items():
        results[path], writes = train(path, arguments, data, backbone)
    if writes:
        Path(out).write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
