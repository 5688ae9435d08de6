"""One forward of the backbone over a batch's distinct texts, one head, one table of users, one optimizer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning import LightningModule
from torch import Tensor, nn

from prm.backbones import Backbone, LoraSpec, open_backbone, resolve, torch_dtype
from prm.errors import UserError
from prm.packing import flex_problem
from prm.preference_accuracy import UserPreferenceAccuracy
from prm.reward_models import FeatureReward, PReF
from prm.training.strategies import partitioned_load, restore_rotary_buffers
from prm.training.validation import UserMeanLoss

log = logging.getLogger(__name__)


class UserTable(nn.Module):
    """States of the training users, [U, z]; a module of its own, since ZeRO 3 gathers parameters around a forward."""

    def __init__(self, states_uz: Tensor) -> None:
        super().__init__()
        self.states: Tensor
        # A method that does not look at users has none to train, and DeepSpeed no use for empty parameters.
        if states_uz.shape[1]:
            self.states = nn.Parameter(states_uz)
        else:
            self.register_buffer("states", states_uz, persistent=False)

    def forward(self, user_index_n: Tensor) -> Tensor:
        """States [N, z] of N users by row."""
        return self.states[user_index_n]


class RewardModelModule(LightningModule):
    """Train a reward model with its user table, and a LoRA adapter below it, on preference pairs.

    The adapter, the head and the users are float32 and trained by one AdamW, each with its own learning rate; the rest
    of the backbone is frozen, stays in eval mode, and may be bfloat16. The model is built in `setup`, since the number
    of users comes from the data.

    Args:
        backbone: hub id, model directory or "pip:PACKAGE".
        reward_model: the method, by class path and arguments; the feature width is supplied.
        revision: of a hub id.
        dtype: of the frozen weights. bfloat16 halves their memory; auto takes it on CUDA and float32 elsewhere.
        lora: the adapter; null trains the head and the users on frozen features.
        pooling: which hidden state is the feature. last is right for causal models, mean or first for encoders.
        gradient_checkpointing: recompute activations in the backward pass: less memory, about a third more time.
        load_partitioned: with deepspeed_stage_3, each rank reads its own part of the weights from the start, for models
            that do not fit one rank's memory. Checkpoints are then verified by their tensors, not by scores.
        attention: kernel of shared and packed rows. flex_attention skips what the mask hides and needs CUDA; auto takes
            it where it gives what sdpa gives.
        adapter_lr: learning rate of the LoRA adapter. The adapter forgets above 1e-3.
        head_lr: learning rate of the head.
        user_lr: learning rate of the users' states. A user is in few batches, so this is the highest.
        weight_decay: of the adapter; the head and the users have none.
        warmup_steps: steps over which all three rates rise from 0.
        schedule: constant, or linear to zero at the last step, after the warm-up.
        user_weighting: user weighs users the same (a pair counts N / (U n_u)), pair weighs pairs the same.
        seed: of the head's, the adapter's and the users' start; the command line takes it from seed_everything.
    """

    def __init__(
        self,
        backbone: str,
        reward_model: Callable[[int], FeatureReward],
        revision: str | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        lora: LoraSpec | None = None,
        pooling: Literal["last", "mean", "first"] = "last",
        gradient_checkpointing: bool = False,
        load_partitioned: bool = False,
        attention: Literal["auto", "sdpa", "flex_attention"] = "auto",
        adapter_lr: float = 2e-4,
        head_lr: float = 1e-3,
        user_lr: float = 1e-2,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        schedule: Literal["constant", "linear"] = "constant",
        user_weighting: Literal["user", "pair"] = "user",
        seed: int = 0,
    ) -> None:
        super().__init__()
        # Lightning's and DeepSpeed's own checkpoints hold trainable weights only.
        self.strict_loading = False
        self._name, self._revision, self._dtype = backbone, revision, dtype
        self._reward_model, self._lora, self._pooling = reward_model, lora, pooling
        self.gradient_checkpointing = gradient_checkpointing
        #: Build shapes alone, on the meta device.
        self.empty = False
        self._attention = attention
        self.load_partitioned = load_partitioned
        self._partitioned_load: Any = None
        self.learning_rates = {"adapter": adapter_lr, "head": head_lr, "users": user_lr}
        self.weight_decay, self.warmup_steps, self.schedule = weight_decay, warmup_steps, schedule
        self.user_weighting, self.seed = user_weighting, seed
        #: Trainable weights by name to start from in place of fresh ones, for a run that is resumed.
        self.initial_state: dict[str, Tensor] | None = None
        self.backbone: Backbone
        self.head: FeatureReward
        self.users: UserTable
        self.accuracy = UserPreferenceAccuracy()
        self.validation_loss = UserMeanLoss()

    def prepare_data(self) -> None:
        # One rank a node downloads and converts; the others then find it in the cache.
        resolve(self._name, revision=self._revision)

    def setup(self, stage: str) -> None:
        if not hasattr(self, "backbone"):
            if self.load_partitioned:
                # from_pretrained partitions what it reads for as long as this object lives.
                self._partitioned_load = partitioned_load(self.trainer.strategy, bfloat16=self._is_bfloat16())
            self.build(len(self.trainer.datamodule.user_ids))
            if self.load_partitioned:
                restore_rotary_buffers(self.backbone)
        if self.initial_state is not None:
            # Before the strategy shards or copies them.
            self.load_trainable(self.initial_state)

    def _is_bfloat16(self) -> bool:
        return torch_dtype(self._dtype) is torch.bfloat16

    def load_trainable(self, state: dict[str, Tensor]) -> None:
        """Put gathered trainable weights (`callbacks.full_state`) into the module; every name and shape must fit.

        Raises:
            UserError: the weights belong to another model.
        """
        own = {name: p for name, p in self.named_parameters() if p.requires_grad}
        # What a head keeps beside its parameters, such as the network that all users began with.
        own |= {f"head.{name}": value for name, value in self.head.state_dict().items()}
        odd = sorted(own.keys() ^ state.keys()) or [n for n in own if own[n].shape != state[n].shape]
        if odd:
            raise UserError(f"the saved weights do not fit this model: {odd[0]} differs ({len(odd)} in all)")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state[name])

    def build(self, num_users: int) -> None:
        """Open the backbone and start the head and the states of `num_users` users, all from the seed.

        Raises:
            UserError: the backbone or an option does not fit.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.backbone = open_backbone(
                self._name,
                revision=self._revision,
                dtype=self._dtype,
                lora=self._lora,
                pooling=self._pooling,
                gradient_checkpointing=self.gradient_checkpointing and not self.empty,
                empty=self.empty,
            )
            with torch.device("meta") if self.empty else contextlib.nullcontext():
                self.head = self._reward_model(self.backbone.hidden_size)
        self._check_head()
        states = self.head.initial_users(num_users, torch.Generator().manual_seed(self.seed)).float()
        self.users = UserTable(states)
        self.training_mode()

    def _check_head(self) -> None:
        """Refuse what this module would train as something else.

        Raises:
            UserError: the method needs another pooling, a start or a batch that is not there.
        """
        name, wanted = type(self.head).__name__, self.head.required_pooling
        if wanted is not None and self._pooling != wanted:
            raise UserError(f"{name} is defined on another feature: it needs model.pooling {wanted}")
        if self.head.context_pairs or self.head.reads_prompt:
            needs = "annotated pairs of the user" if self.head.context_pairs else "the prompt's own feature"
            raise UserError(f"{name} reads {needs}, which the recipe's batches do not hold: it cannot be trained here")
        if isinstance(self.head, PReF) and self.head.start != "random":
            raise UserError(
                f"PReF's start {self.head.start} is a function of its own (prm.reward_models.pref_start) that the "
                "recipe does not call: set model.reward_model.init_args.start random"
            )

    def training_mode(self) -> None:
        """Adapter and head in train mode (dropout), everything frozen in eval mode."""
        self.backbone.eval()
        for name, module in self.backbone.named_modules():
            if "lora_" in name:
                module.train()
            # Transformers checkpoints a layer only while the layer itself, but not its parts, is in train mode.
            elif self.gradient_checkpointing and getattr(module, "gradient_checkpointing", None) is True:
                module.training = True
        self.head.train()

    def on_fit_start(self) -> None:
        self._settle_rows()
        self.training_mode()

    def _settle_rows(self) -> None:
        """Choose the attention kernel of shared rows, and find out whether this backbone allows them at all.

        Raises:
            UserError: a layout that was asked for by name and does not fit, or cached features below an adapter.
        """
        data = self.trainer.datamodule
        if data.cached_features is not None:
            if self._lora is not None:
                raise UserError("data.cached_features needs a frozen backbone: set model.lora null, or leave it out")
            return
        if data.rows.layout == "padded":
            return
        device = self.device
        if self._attention != "sdpa" and not self.backbone.rows_problem():
            problem = flex_problem(device)
            if problem is None:
                self.backbone.use_attention("flex_attention")
                data.rows.multiple_of = 128
            elif self._attention == "flex_attention":
                raise UserError(f"model.attention flex_attention: {problem}; use sdpa")
            elif device.type == "cuda":
                log.warning("%s: shared rows run with a dense mask", problem)
        if reason := self.backbone.rows_differ():
            if data.layout != "auto":
                raise UserError(f"data.layout {data.layout}: {reason}; use padded")
            log.warning("%s: every text gets a row of its own", reason)
            data.rows.layout = "padded"

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Features [N, d] of the chosen and of the rejected texts, and users' states [N, z], of a batch of N pairs."""
        features_md = self.text_features(batch)
        return features_md[batch["chosen"]], features_md[batch["rejected"]], self.users(batch["user_index"])

    def text_features(self, batch: dict[str, Tensor]) -> Tensor:
        """Features [M, d] of a batch's texts: ready ones, those of rows, or of padded sequences."""
        if "features" in batch:
            return batch["features"]
        if "visible_until" in batch:
            return self.backbone.features_of_rows(batch)
        features_md: Tensor = self.backbone(batch["input_ids"], batch["attention_mask"])
        return features_md

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        # Every batch of every rank has the same number of pairs, so the mean over ranks of these means is the mean
        # over pairs.
        weight_n = batch["weight"] if self.user_weighting == "user" else None
        chosen_nd, rejected_nd, user_nz = self(batch)
        loss = self.head("loss", chosen_nd, rejected_nd, user_nz, weight_n)
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=True, batch_size=len(batch["chosen"]))
        return loss

    def _evaluation_step(self, batch: dict[str, Tensor]) -> None:
        chosen_nd, rejected_nd, user_nz = self(batch)
        both = self.head("scores", torch.cat([chosen_nd, rejected_nd]), torch.cat([user_nz, user_nz]))
        chosen, rejected = both.chunk(2)
        self.accuracy.update(batch["sample_ids"], batch["user_index"], chosen, rejected)
        self.validation_loss.update(batch["sample_ids"], batch["user_index"], chosen, rejected)

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self._evaluation_step(batch)

    def test_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self._evaluation_step(batch)

    def _log_evaluation(self, suffix: str) -> None:
        figures = self.accuracy.compute()
        # The same on every rank: the metrics gather all rows.
        self.log(f"preferences/rm_accuracy{suffix}", figures["accuracy"], prog_bar=True, rank_zero_only=False)
        self.log(f"preferences/rm_accuracy_strict{suffix}", figures["strict"])
        self.log(f"preferences/ties{suffix}", float(figures["ties"]))
        self.log("validation/loss" if not suffix else f"test{suffix}/loss", self.validation_loss.compute())
        self.accuracy.reset()
        self.validation_loss.reset()

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("_seen")

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Trainable parameters by part, each with its learning rate; parts without parameters are left out."""
        parts = {
            "adapter": [p for p in self.backbone.parameters() if p.requires_grad],
            "head": list(self.head.parameters()),
            "users": list(self.users.parameters()),
        }
        return [
            {
                "params": parameters,
                "lr": self.learning_rates[name],
                "weight_decay": self.weight_decay if name == "adapter" else 0.0,
                "name": name,
            }
            for name, parameters in parts.items()
            if parameters
        ]

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameter_groups())
        total = float(self.trainer.estimated_stepping_batches)
        if self.schedule == "linear" and total == float("inf"):
            raise UserError("model.schedule linear needs an end: set trainer.max_steps or trainer.max_epochs")

        def rate(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / (self.warmup_steps + 1)
            return (
                1.0 if self.schedule == "constant" else max(0.0, (total - step) / max(1.0, total - self.warmup_steps))
            )

        def rate_of(part: str) -> Callable[[int], float]:
            # Methods that alternate rest a part in some steps.
            return lambda step: 0.0 if part in self.head.resting(step) else rate(step)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [rate_of(g["name"]) for g in optimizer.param_groups])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
