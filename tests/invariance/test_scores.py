"""A trained model gives one text and one user one score, however it is asked."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prm.backbones import Backbone, open_tokenizer
from prm.checkpoints import RewardCheckpoint, open_checkpoint, save_checkpoint
from prm.features import TransformersFeatures, pad_batch
from prm.packing import pack
from prm.records import user_prompt
from prm.user_states import UserStates

TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def texts():
    """Rows of several lengths, some with a prompt in common, one of them twice."""
    prompts = [user_prompt(f"Title of matter {i}" + " and of more than that" * (i % 3)) for i in range(4)]
    rows = [(prompt, response) for prompt in prompts for response in ("Rain", "Rain on Mars: how to stay dry?", "Dust")]
    return [*rows, rows[1]]


@pytest.fixture
def live(method, reference):
    """The trained model as a checkpoint that was never written."""
    done = reference(method)
    module, data = done.module, done.data
    users = UserStates(data.user_ids, module.users.states)
    return RewardCheckpoint(None, {}, module.backbone, module.head.eval(), users, data.formatter)


@pytest.fixture
def sequences(live, texts):
    return [encoded.ids for encoded in live.formatter.encode_all(texts)]


def scores(checkpoint, features):
    """Rewards [U, N] of features [N, d] for all users."""
    with torch.inference_mode():
        return checkpoint.head.scores_for_all(torch.as_tensor(features), checkpoint.users.states).numpy()


@pytest.fixture
def alone(live, sequences):
    """Each text by itself: neither a batch nor padding."""
    live.backbone.eval()
    with torch.inference_mode():
        return scores(live, torch.cat([live.backbone(*pad_batch([s], 0)) for s in sequences]))


def agree(found, expected):
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < TOLERANCE * max(1.0, np.abs(expected).max())


def test_the_scores_differ_between_texts(alone):
    """A model that scores everything the same passes everything below."""
    assert np.abs(alone[:, 0] - alone[:, 1]).max() > 10 * TOLERANCE
    agree(alone[:, 1], alone[:, -1])


@pytest.mark.parametrize("batch_size", [1, 3, 13])
def test_batch_sizes(live, sequences, alone, batch_size):
    agree(scores(live, TransformersFeatures(live.backbone, batch_size).features(sequences)), alone)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("pad_id", [0, 2, 77])
def test_padding_on_either_side_and_with_any_id(live, sequences, alone, left, pad_id):
    with torch.inference_mode():
        agree(scores(live, live.backbone(*pad_batch(sequences, pad_id, left=left))), alone)


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_rows(live, sequences, alone, layout):
    with torch.inference_mode():
        agree(scores(live, live.backbone.features_of_rows(pack(sequences, 0, layout=layout, min_shared=0.2))), alone)


def test_one_user_at_a_time_and_all_at_once(live, texts, alone):
    for row, user in enumerate(live.users.ids):
        agree(live.rewards([user] * len(texts), texts), alone[row])


def test_saved_and_reloaded(live, texts, alone, tmp_path):
    save_checkpoint(
        tmp_path / "checkpoint", backbone=live.backbone, head=live.head, users=live.users, formatter=live.formatter
    )
    reloaded = open_checkpoint(tmp_path / "checkpoint")
    for row, user in enumerate(live.users.ids):
        agree(reloaded.rewards([user] * len(texts), texts), alone[row])


def test_merged_adapter(live, sequences, alone, tmp_path):
    save_checkpoint(
        tmp_path / "checkpoint", backbone=live.backbone, head=live.head, users=live.users, formatter=live.formatter
    )
    merged = open_checkpoint(tmp_path / "checkpoint").backbone.model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert not any("lora" in name for name, _ in plain.named_parameters())
    tokenizer = open_tokenizer(live.backbone.name)
    backbone = Backbone("merged", None, plain, tokenizer, encoder=False, pooling="last", lora=None)
    agree(scores(live, TransformersFeatures(backbone, 4).features(sequences)), alone)
