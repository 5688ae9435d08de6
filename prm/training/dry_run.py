"""What a run would be, without running it: parameters, memory per GPU, tokens a step, DeepSpeed's configuration.

The model is built on the meta device, so neither its weights nor their memory are needed; the data, the sampler and
the batches are the real ones. A large run on a cluster can be planned on a laptop.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prm import packing
from prm.errors import UserError
from prm.training.module import RewardModelModule

log = logging.getLogger(__name__)

#: Most batches of the first epoch whose tokens are counted.
COUNTED_BATCHES = 500
# DeepSpeed's own defaults, which apply because nothing of ours sets them.
_PERSISTENCE_THRESHOLD = 100_000
_MAX_LIVE_PARAMETERS = 1_000_000_000
_TEXTS = ("input_ids", "attention_mask", "position_ids", "visible_until", "row", "column")
_PARTS = ("backbone", "adapter", "head", "users")


@dataclass(frozen=True)
class Part:
    """Parameters of one part of the model, in numbers and bytes."""

    parameters: int
    trainable: int
    bytes: int


@dataclass(frozen=True)
class Tokens:
    """Token columns per rank and batch: their mean, the most in one batch, and the share of padding among them."""

    mean: float
    most: int
    padding: float


@dataclass(frozen=True)
class Memory:
    """Bytes per GPU that last through a step; `gathered` are whole weights while layers use them (ZeRO 3)."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.buffers + self.gathered


def parts(module: RewardModelModule) -> dict[str, Part]:
    """Parameters by part; the frozen backbone without its adapter comes first."""
    found: dict[str, list[nn.Parameter]] = {name: [] for name in _PARTS}
    for parameter in module.backbone.parameters():
        found["adapter" if parameter.requires_grad else "backbone"].append(parameter)
    found["head"] = list(module.head.parameters())
    found["users"] = list(module.users.parameters())
    return {
        name: Part(
            sum(p.numel() for p in rows),
            sum(p.numel() for p in rows if p.requires_grad),
            sum(p.numel() * p.element_size() for p in rows),
        )
        for name, rows in found.items()
    }


def memory(parameters: list[nn.Parameter], gpus: int, stage: int, *, bucket: int = 20_000_000) -> Memory:
    """What the weights and their training keep on each of `gpus` GPUs under a ZeRO stage.

    Trainable weights, their gradients and AdamW's two moments are float32 here, 4 bytes each. DeepSpeed keeps a
    second, sharded copy of the trainable weights, which it updates. Stage 1 shards that and the moments, stage 2 the
    gradients as well, stage 3 also the weights, except those below 100,000 numbers (DeepSpeed's persistence
    threshold: norms, and most LoRA matrices). (Rajbhandari et al. 2020, section 3, with 4-byte gradients and weights.)

    Args:
        parameters: of the whole model.
        gpus: N.
        stage: 0 to 3; 0 is plain DDP, or one GPU without it.
        bucket: numbers in DeepSpeed's reduce bucket.
    """
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    whole = sum(p.numel() * p.element_size() for p in parameters)
    if stage == 0:
        # DDP reduces in buckets of its own, as large as the gradients.
        return Memory(whole, 4 * trainable, 8 * trainable, 4 * trainable if gpus > 1 else 0)

    def shard(numbers: int) -> int:
        return -(-numbers // gpus)

    optimizer = 12 * shard(trainable)
    # The bucket, and the copy of it that is under way while the next one fills.
    buffers = 4 * bucket
    if stage < 3:
        return Memory(whole, 4 * (trainable if stage == 1 else shard(trainable)), optimizer, buffers)
    small = [p for p in parameters if p.numel() < _PERSISTENCE_THRESHOLD]
    large = [p for p in parameters if p.numel() >= _PERSISTENCE_THRESHOLD]
    kept = sum(p.numel() * p.element_size() for p in small)
    sharded = sum(shard(p.numel()) * p.element_size() for p in large)
    live, gathered = 0, 0
    for parameter in large:
        if live + parameter.numel() > _MAX_LIVE_PARAMETERS:
            break
        live += parameter.numel()
        gathered += parameter.numel() * parameter.element_size()
    return Memory(kept + sharded, 4 * shard(trainable), optimizer, buffers, gathered if gpus > 1 else 0)


def batches(data: Any, ranks: int, accumulate: int) -> Iterator[list[int]]:
    """Sample ids of rank 0's batches at the start of the first epoch."""
    for number, batch in enumerate(data.train_sampler(0, ranks, accumulate)):
        if number == COUNTED_BATCHES:
            return
        yield batch


def count_tokens(tokens: Any, sample_ids: list[list[int]], layout: str) -> Tokens:
    """Token columns of batches under a layout, as `PairTokens.collate` makes them."""
    before, tokens.rows.layout = tokens.rows.layout, layout
    try:
        columns, real = [], 0
        for ids in sample_ids:
            batch = tokens.collate(ids)
            columns.append(batch["input_ids"].numel())
            real += _real_columns(tokens, ids, batch)
    finally:
        tokens.rows.layout = before
    return Tokens(sum(columns) / len(columns), max(columns), 1 - real / sum(columns))


def _real_columns(tokens: Any, ids: list[int], batch: dict[str, Tensor]) -> int:
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    rows = tokens.rows
    found = packing.trees(
        [tokens.sequences[n] for n in tokens.text_numbers(ids)],
        share=rows.layout == "shared",
        min_shared=rows.min_shared,
        row_tokens=rows.row_tokens,
    )
    return sum(map(len, found))


class SavedForBackward:
    """Context that counts the bytes which a forward keeps for its backward pass; parameters are not among them.

    Attributes:
        bytes: kept in all, but for `scores`.
        scores: attention probabilities [.., T, T] and masks of that size, which only unfused kernels keep.
    """

    def __init__(self, module: nn.Module, columns: int) -> None:
        self._known = {self._key(p) for p in module.parameters()}
        self._columns = columns
        self.bytes = 0
        self.scores = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)
        self._kept: list[Tensor] = []

    @staticmethod
    def _key(tensor: Tensor) -> int:
        # Views share what is kept. Meta tensors have no addresses, but their storages are objects.
        return int(tensor.untyped_storage()._cdata)

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._key(tensor) not in self._known:
            self._known.add(self._key(tensor))
            # While a tensor is held, no other can be given its storage.
            self._kept.append(tensor)
            size = tensor.untyped_storage().nbytes()
            if tensor.ndim >= 3 and tensor.shape[-1] == tensor.shape[-2] == self._columns:
                self.scores += size
            else:
                self.bytes += size
        return tensor

    def __enter__(self) -> SavedForBackward:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._kept.clear()


def activations(module: RewardModelModule, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Bytes that a batch's forward keeps for its backward: (all but attention scores, attention scores).

    Without weights this falls short by each layer's attention output, a tenth or so: fused kernels cannot be asked.

    With gradient checkpointing, what each layer starts from, and the largest layer's own while it is recomputed.
    """
    rows, columns = batch["input_ids"].shape
    device = next(module.backbone.parameters()).device
    texts = {name: value.to(device) for name, value in batch.items() if name in _TEXTS}
    if device.type == "meta" and "attention_mask" in texts:
        # Transformers looks into a mask of padding, and there is nothing in this one; a full mask it takes as it is.
        texts["attention_mask"] = torch.ones(rows, 1, columns, columns, dtype=torch.bool, device=device)
    saved = SavedForBackward(module, columns)
    with saved:
        if "visible_until" in texts:
            module.backbone.features_of_rows(texts)
        else:
            module.backbone.hidden_states(**texts)
    if not module.gradient_checkpointing:
        return saved.bytes, saved.scores
    config = module.backbone.model.config.get_text_config()
    layers = int(config.num_hidden_layers)
    starts = layers * rows * columns * module.backbone.hidden_size * module.backbone.dtype.itemsize
    return starts + saved.bytes // layers, saved.scores // layers


def check_layout(module: RewardModelModule, data: Any) -> None:
    """Refuse a layout that the backbone does not allow, as the run would; `auto` becomes padded."""
    reason = module.backbone.rows_problem()
    if data.rows.layout != "padded" and reason:
        if data.layout != "auto":
            raise UserError(f"data.layout {data.layout}: {reason}; use padded")
        data.rows.layout = "padded"


def report(module: RewardModelModule, data: Any, trainer: Any, *, planned_for: str) -> str:
    """The report of `--dry-run`.

    Args:
        module: not built yet.
        data: not set up yet.
        trainer: whose strategy, ranks and limits are the run's.
        planned_for: "cuda" or "cpu".

    Raises:
        UserError: whatever would stop the run before its first step.
    """
    gpus = trainer.num_devices * trainer.num_nodes
    accumulate = trainer.accumulate_grad_batches
    data.plan_only = True
    data.setup("fit")
    module.empty = True
    module.build(len(data.user_ids))
    check_layout(module, data)
    tokens = data.split_tokens("train")
    sampler = data.train_sampler(0, gpus, accumulate)
    ids = list(batches(data, gpus, accumulate))
    device = "GPU" if planned_for == "cuda" else "CPU rank"
    lines = ["dry run: the model has shapes without weights, and nothing is written", "", f"data      {data.summary()}"]
    lines += _parameters(module)
    lines += _steps(sampler, gpus, accumulate, len(tokens), trainer, device)
    cached = data.cached_features is not None
    if cached:
        lines += ["", f"tokens    none: features come from the cache, computed once by {data.cached_features}"]
        kept = (0, 0)
    else:
        lines += _tokens(tokens, ids)
        most = max(ids, key=lambda batch: tokens.collate(batch)["input_ids"].numel())
        kept = activations(module, tokens.collate(most))
    lines += _memory(module, gpus, kept, device, cached)
    lines += _strategy(module, trainer)
    return "\n".join(lines) + "\n"


def _parameters(module: RewardModelModule) -> list[str]:
    found = parts(module)
    total, trainable = (sum(getattr(p, key) for p in found.values()) for key in ("parameters", "trainable"))
    dtype = str(module.backbone.dtype).removeprefix("torch.")
    lines = ["", f"model     {type(module.head).__name__} on {module.backbone.name}, frozen weights in {dtype}"]
    for name, part in found.items():
        kind = "frozen" if not part.trainable else "trainable, float32"
        if part.parameters:
            lines.append(f"  {name:<9} {part.parameters:>15,} parameters  {_size(part.bytes):>9}  {kind}")
    lines.append(f"  trainable {trainable:>15,} parameters, {trainable / total:.2%} of {total:,}")
    return lines


def _steps(sampler: Any, gpus: int, accumulate: int, pairs: int, trainer: Any, device: str) -> list[str]:
    each = f"{sampler.batch_size} pairs a batch x {gpus} {device}{'s' if gpus != 1 else ''}"
    each += f" x {accumulate} batches accumulated" if accumulate > 1 else ""
    steps = len(sampler) // accumulate
    left = (
        f"; {sampler.num_left_out} of {pairs} pairs left out of each, others each time" if sampler.num_left_out else ""
    )
    lines = ["", f"steps     {sampler.pairs_per_step} pairs a step ({each}); {steps} steps an epoch{left}"]
    limits = []
    if trainer.max_epochs not in (None, -1):
        limits.append(steps * trainer.max_epochs)
    if trainer.max_steps != -1:
        limits.append(trainer.max_steps)
    if limits:
        lines.append(f"          {min(limits)} steps in all, {min(limits) / steps:.3g} epochs")
    return lines


def _tokens(tokens: Any, ids: list[list[int]]) -> list[str]:
    layout = tokens.rows.layout
    own = count_tokens(tokens, ids, layout)
    lines = ["", f"tokens    per rank and batch, over {len(ids)} batches of the first epoch"]
    lines.append(f"  {layout:<9} {own.mean:>10,.0f} on average, {own.most:,} at most; {own.padding:.1%} padding")
    if layout != "padded":
        plain = count_tokens(tokens, ids, "padded")
        lines.append(
            f"  (padded   {plain.mean:>10,.0f} on average, {plain.most:,} at most; {plain.padding:.1%} padding: "
            f"{plain.mean / own.mean:.2f} times as many)"
        )
    return lines


def _memory(module: RewardModelModule, gpus: int, kept: tuple[int, int], device: str, cached: bool) -> list[str]:
    parameters = list(module.parameters())
    if cached:
        parameters = [*module.head.parameters(), *module.users.parameters()]
    of = f"each of {gpus} {device}s" if gpus > 1 else f"one {device}"
    lines = ["", f"memory    of {of}, in GB; the CUDA context and the libraries' own buffers come on top"]
    titles = ("weights", "gradients", "optimizer", "buckets", "gathered", "activations", "total")
    lines.append(" " * 14 + "".join(f"{title:>12}" for title in titles))
    for stage in range(4):
        use = memory(parameters, gpus, stage)
        name = f"ZeRO {stage}" if stage else "no ZeRO"
        numbers = (use.weights, use.gradients, use.optimizer, use.buffers, use.gathered, kept[0], use.total + kept[0])
        lines.append(f"  {name:<12}" + "".join(f"{number / 1e9:>12.3f}" for number in numbers))
    if not cached:
        lines.append("  activations: what the largest of these batches keeps for its backward pass, to within a sixth")
        if kept[1]:
            lines.append(
                f"  {_size(kept[1])} more where the attention kernel keeps its scores (eager, or sdpa without a fused "
                "kernel)"
            )
    else:
        lines.append("  the backbone is not among it: it has left the memory once the features are cached")
    if gpus > 1 and not cached:
        lines.append("  gathered: DeepSpeed keeps up to 1e9 gathered numbers, so small models lie whole on each rank")
    return lines


def _strategy(module: RewardModelModule, trainer: Any) -> list[str]:
    strategy = trainer.strategy
    config = getattr(strategy, "config", None)
    if not isinstance(config, dict):
        return ["", f"strategy  {type(strategy).__name__}: no DeepSpeed configuration"]
    # What Lightning does when a fit starts.
    module.trainer = trainer
    strategy.connect(module)
    strategy._init_config_if_needed()
    return ["", "strategy  DeepSpeed, configured by", json.dumps(strategy.config, indent=2)]


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.2f} GB"
