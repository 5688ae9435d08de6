import logging

import numpy as np
import pytest
import torch

from data_modules.preference_data import PreferenceDataModule, user_weights
from prm.dataset_dir import write_dataset
from prm.errors import UserError
from prm.packing import attention_mask
from prm.records import PreferencePair, User, user_prompt


def pair(name: str, user: str, split: str, prompt: str, chosen: str, rejected: str) -> PreferencePair:
    return PreferencePair(name, user, split, user_prompt(prompt), chosen, rejected)


PAIRS = [
    pair("1", "ann", "train", "Name a fruit.", "An apple", "A pear, perhaps?"),
    pair("2", "bob", "train", "Name a fruit.", "A pear, perhaps?", "An apple"),
    pair("3", "bob", "train", "Name a tool.", "A hammer", "A saw is what I would take"),
    pair("4", "bob", "train", "Name a city.", "Oslo", "Rome it is"),
    pair("5", "bob", "validation", "Name a river.", "The Rhine", "Po"),
    pair("6", "ann", "test_seen", "Name a lake.", "Como", "Lake Constance"),
    pair("7", "eve", "validation", "Name a river.", "Po", "The Rhine"),
]
USERS = [User("ann", "train"), User("bob", "train"), User("eve", "train"), User("new", "adapt")]


def write(directory, pairs):
    write_dataset(
        directory, name="toy", pairs=pairs, completions=[], users=USERS, source="made", licence="CC0-1.0", seed=0
    )
    return str(directory)


@pytest.fixture
def data(tmp_path, tiny_llama_path):
    return PreferenceDataModule(
        write(tmp_path / "toy", PAIRS), str(tiny_llama_path), batch_size=4, max_length=64, layout="padded"
    )


def test_weights_make_users_equal():
    # N = 4 pairs, U = 2 users: ann has one pair, bob three.
    assert user_weights({"ann": 1, "bob": 3}) == {"ann": pytest.approx(2.0), "bob": pytest.approx(2 / 3)}
    losses = {"ann": [1.0], "bob": [4.0, 5.0, 6.0]}
    weights = user_weights({"ann": 1, "bob": 3})
    mean = sum(weights[u] * x for u, rows in losses.items() for x in rows) / 4
    assert mean == pytest.approx((1.0 + 5.0) / 2)


def test_a_batch_holds_each_text_once(data):
    data.setup("fit")
    (batch,) = list(data.train_dataloader())
    # Four pairs, eight texts, two of which ann and bob share.
    assert batch["input_ids"].shape[0] == 6
    texts = data.formatter.tokenizer
    rows = dict(zip(batch["sample_ids"].tolist(), range(4), strict=True))
    for index, expected in enumerate(PAIRS[:4]):
        row = rows[index]
        for side in ("chosen", "rejected"):
            place = batch[side][row]
            ids = batch["input_ids"][place][batch["attention_mask"][place] == 1]
            encoded = data.formatter.encode(expected.prompt, getattr(expected, side))
            assert ids.tolist() == list(encoded.ids)
            assert getattr(expected, side) in texts.decode(ids)
        assert data.user_ids[batch["user_index"][row]] == expected.user_id
        assert batch["weight"][row].item() == pytest.approx(2.0 if expected.user_id == "ann" else 2 / 3)


def test_padding_is_on_the_right(data):
    data.setup("fit")
    (batch,) = list(data.train_dataloader())
    mask = batch["attention_mask"]
    assert (mask[:, :-1] >= mask[:, 1:]).all()
    assert (mask.sum(1) < mask.shape[1]).any()
    assert (mask[:, 0] == 1).all()


def test_users_without_training_pairs_are_left_out_and_counted(data):
    data.setup("fit")
    assert data.user_ids == ["ann", "bob"]
    assert data.pairs_per_user == {"ann": 1, "bob": 3}
    assert data.counts["validation_pairs"] == 1
    assert data.counts["validation_pairs_of_untrained_users"] == 1
    assert "1 pairs of users without training pairs left out" in data.summary()
    (batch,) = list(data.val_dataloader())
    assert batch["sample_ids"].tolist() == [0]


def test_seen_users_test_split_is_read_for_tests_only(data):
    data.setup("fit")
    assert data.test_dataloader() == []
    data.setup("test")
    (batch,) = list(data.test_dataloader())
    assert data.user_ids[int(batch["user_index"][0])] == "ann"


def test_cut_texts_are_counted(tmp_path, tiny_llama_path):
    long = [pair("1", "ann", "train", "word " * 300, "short", "also short")]
    data = PreferenceDataModule(write(tmp_path / "toy", long), str(tiny_llama_path), batch_size=1, max_length=32)
    data.layout = data.rows.layout = "padded"
    data.setup("fit")
    assert data.counts["cut_sequences"] == 2
    assert data.counts["cut_tokens"] > 400
    assert "2 of 2 distinct texts cut to 32 tokens" in data.summary()
    (batch,) = list(data.train_dataloader())
    assert batch["input_ids"].shape == (2, 32)


def test_pairs_left_out_of_an_epoch_are_logged(data, caplog):
    data.setup("fit")
    data.batch_size = 3
    with caplog.at_level(logging.INFO, logger="data_modules"):
        loader = data.train_dataloader()
    assert "1 of 4 training pairs are left out of each epoch" in caplog.text
    assert len(list(loader)) == 1


def test_a_missing_dataset_is_one_line(tiny_llama_path):
    with pytest.raises(UserError, match="no dataset directory at /nowhere"):
        PreferenceDataModule("/nowhere", str(tiny_llama_path))


def test_no_training_pairs_is_an_error(tmp_path, tiny_llama_path):
    data = PreferenceDataModule(write(tmp_path / "toy", PAIRS[4:5]), str(tiny_llama_path))
    with pytest.raises(UserError, match="no training pairs"):
        data.setup("fit")


def test_labels_do_not_leak_through_formatting(data):
    """Swapping chosen and rejected swaps the rows and changes nothing else."""
    data.setup("fit")
    tokens = data._tokens["train"]
    ann, bob = tokens.collate([0]), tokens.collate([1])
    assert torch.equal(ann["input_ids"][ann["chosen"]], bob["input_ids"][bob["rejected"]])
    assert torch.equal(ann["input_ids"][ann["rejected"]], bob["input_ids"][bob["chosen"]])


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_rows_hold_the_same_texts(data, layout):
    data.setup("fit")
    (plain,) = list(data.train_dataloader())
    data.rows.layout = layout
    (batch,) = list(data.train_dataloader())
    for name in ("chosen", "rejected", "user_index", "weight", "sample_ids"):
        assert torch.equal(batch[name], plain[name])
    for number in range(6):
        row, column = batch["row"][number], batch["column"][number]
        seen = attention_mask(batch["visible_until"])[row, 0, column]
        expected = plain["input_ids"][number][plain["attention_mask"][number] == 1]
        assert torch.equal(batch["input_ids"][row][seen], expected)


def test_ready_features_take_the_texts_place(data):
    data.setup("fit")
    tokens = data.split_tokens("train")
    (plain,) = list(data.train_dataloader())
    tokens.features = np.arange(len(tokens.sequences) * 3, dtype=np.float32).reshape(-1, 3)
    (batch,) = list(data.train_dataloader())
    assert "input_ids" not in batch
    for number in range(6):
        ids = plain["input_ids"][number][plain["attention_mask"][number] == 1].tolist()
        assert batch["features"][number].tolist() == tokens.features[tokens.sequences.index(tuple(ids))].tolist()


def test_a_share_outside_0_to_1_is_refused(tmp_path, tiny_llama_path):
    with pytest.raises(UserError, match=r"data\.min_shared 1\.5"):
        PreferenceDataModule(write(tmp_path / "toy", PAIRS), str(tiny_llama_path), min_shared=1.5)
