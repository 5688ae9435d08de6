"""Rows of several sequences: the plain reference is a sequence's own causal mask, and the model's own forward."""

import random

import pytest
import torch

from prm import packing
from prm.backbones import LoraSpec, open_backbone
from prm.errors import UserError
from prm.features import pad_batch
from prm.packing import attention_mask, block_mask, common_prefix, fill_rows, pack, trees


def some_sequences(seed: int, *, contexts: int = 2, prompts: int = 3, vocabulary: int = 40) -> list[tuple[int, ...]]:
    """Users' contexts, prompts after each, responses after each prompt; one a beginning of another, two equal."""
    draw = random.Random(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.randrange(1, vocabulary) for _ in range(draw.randint(low, high)))

    found = []
    for _ in range(contexts):
        context = tokens(5, 20)
        for _ in range(prompts):
            prompt = context + tokens(2, 9)
            found += [prompt + tokens(1, 6) for _ in range(draw.randint(1, 3))]
    found += [found[0], found[1] + tokens(2, 3)]
    draw.shuffle(found)
    return found


def read_back(batch: dict[str, torch.Tensor], number: int) -> list[int]:
    """Token ids that a sequence's last token attends to, in order: the sequence, if the mask is right."""
    row, column = int(batch["row"][number]), int(batch["column"][number])
    seen = attention_mask(batch["visible_until"])[row, 0, column]
    return batch["input_ids"][row][seen].tolist()


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("options", [{}, {"min_shared": 0.0}, {"row_tokens": 30}, {"multiple_of": 16}])
def test_every_token_sees_its_own_sequence_and_nothing_else(layout, seed, options):
    sequences = some_sequences(seed)
    batch = pack(sequences, pad_id=0, layout=layout, **options)
    assert batch["input_ids"].shape[1] % options.get("multiple_of", 1) == 0
    for number, sequence in enumerate(sequences):
        assert read_back(batch, number) == list(sequence)
        row, column = int(batch["row"][number]), int(batch["column"][number])
        mask = attention_mask(batch["visible_until"])[row, 0]
        columns = mask[column].nonzero().flatten()
        assert batch["position_ids"][row][columns].tolist() == list(range(len(sequence)))
        # And so does every token on the way: as in a causal mask of the sequence alone.
        assert torch.equal(mask[columns][:, columns], torch.ones(len(sequence), len(sequence)).tril().bool())
        for inner in columns.tolist():
            assert set(mask[inner].nonzero().flatten().tolist()) <= set(columns.tolist())


def test_padding_sees_itself_alone_and_nothing_sees_it():
    batch = pack([tuple(range(1, 10)), (11, 12, 13)], pad_id=0)
    mask = attention_mask(batch["visible_until"])[:, 0]
    padding = batch["input_ids"] == 0
    assert padding.sum() == 6
    for row, column in padding.nonzero().tolist():
        assert mask[row, column].nonzero().flatten().tolist() == [column]
        assert mask[row, :, column].nonzero().flatten().tolist() == [column]


def test_what_is_shared_stands_once():
    context = tuple(range(1, 101))
    sequences = [(*context, 200 + i, *range(300, 300 + i)) for i in range(6)]
    shared = pack(sequences, 0)
    assert shared["input_ids"].numel() == 100 + sum(len(s) - 100 for s in sequences)
    packed = pack(sequences, 0, layout="packed")
    assert packed["input_ids"].numel() == len(sequences) * 106


def test_sequences_join_when_they_share_enough():
    pair = [(1, 2, 3, 4, 5, 6), (1, 2, 3, 7, 8, 9)]
    assert len(trees(pair, min_shared=0.5)) == 1
    assert len(trees(pair, min_shared=0.51)) == 2
    assert len(trees([(1, 2), (3, 4)], min_shared=0.0)) == 2
    assert len(trees(pair, share=False)) == 2


def test_a_tree_that_grows_too_long_is_cut():
    sequences = [(1, 2, 3, 4, 10 + i) for i in range(9)]
    found = trees(sequences, row_tokens=7)
    assert [len(tree) for tree in found] == [7, 7, 7]
    assert sorted(n for tree in found for n in tree.ends) == list(range(9))


def test_an_empty_sequence_is_refused():
    with pytest.raises(ValueError, match="empty"):
        pack([(1, 2), ()], 0)


@pytest.mark.parametrize(("a", "b"), [("", "x"), ("abc", "abd"), ("abc", "abc"), ("abc", "abcd"), ("xbc", "abc")])
def test_common_prefix(a, b):
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(tuple(a), tuple(b)) == expected


def test_rows_are_filled_and_never_overfull():
    lengths = [9, 2, 7, 3, 4, 4, 1, 9]
    rows = fill_rows(lengths, 10)
    assert sorted(n for row in rows for n in row) == list(range(8))
    assert all(sum(lengths[n] for n in row) <= 10 for row in rows)
    assert len(rows) == 4  # 39 tokens do not fit three rows of ten


@pytest.mark.parametrize("window", [None, 4])
def test_flex_attentions_mask_is_the_same(window):
    batch = pack(some_sequences(1), 0, min_shared=0.0)
    until, positions = batch["visible_until"], batch["position_ids"]
    expected = attention_mask(until, positions, window)[:, 0]
    visible = block_mask(until, positions, window).mask_mod
    rows, width = until.shape
    for row in range(rows):
        found = [[bool(visible(row, 0, q, k)) for k in range(width)] for q in range(width)]
        assert torch.equal(torch.tensor(found), expected[row])


def test_a_window_counts_positions_and_not_columns():
    batch = pack([(1, 2, 3, 4), (1, 2, 3, 5)], 0)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    mask = attention_mask(batch["visible_until"], batch["position_ids"], window=2)[0, 0]
    assert mask[4].tolist() == [False, False, True, False, True]


# In a model


@pytest.fixture(scope="module")
def backbone(tiny_llama_path):
    return with_random_adapter(str(tiny_llama_path))


def with_random_adapter(name, **options):
    backbone = open_backbone(name, dtype="float32", lora=LoraSpec(r=4, alpha=8), **options)
    torch.manual_seed(1)
    for parameter_name, parameter in backbone.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.05)
    return backbone


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
def test_features_and_gradients_equal_separate_forwards(backbone, layout, pooling):
    backbone.pooling = pooling
    sequences = some_sequences(3, vocabulary=4000)
    weights = torch.randn(len(sequences), backbone.hidden_size, generator=torch.Generator().manual_seed(0))
    results = []
    for shared in (False, True):
        backbone.zero_grad()
        if shared:
            features = backbone.features_of_rows(pack(sequences, backbone.pad_id, layout=layout, min_shared=0.2))
        else:
            # One by one: neither padding nor a batch.
            features = torch.cat([backbone(*pad_batch([s], backbone.pad_id)) for s in sequences])
        (features * weights).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in backbone.parameters() if p.requires_grad])
        results.append((features.detach(), gradient))
    (plain, plain_gradient), (shared, shared_gradient) = results
    assert (shared - plain).abs().max() < 1e-4 * plain.abs().max()
    assert (shared_gradient - plain_gradient).abs().max() < 1e-4 * plain_gradient.abs().max()


def test_a_branch_does_not_feel_its_neighbour(backbone):
    backbone.pooling = "last"
    prompt = tuple(range(100, 130))
    first = backbone.features_of_rows(pack([(*prompt, 7, 8), (*prompt, 9)], 0))
    second = backbone.features_of_rows(pack([(*prompt, 7, 8), (*prompt, 900, 901, 902)], 0))
    assert (first[0] - second[0]).abs().max() < 1e-5 * first.abs().max()
    assert (first[1] - second[1]).abs().max() > 1e-2 * first.abs().max()


def test_smollm2_gives_the_same_features(smollm2_path):
    backbone = with_random_adapter(str(smollm2_path))
    sequences = some_sequences(5, contexts=1, vocabulary=40000)
    with torch.no_grad():
        plain = backbone(*pad_batch(sequences, backbone.pad_id))
        shared = backbone.features_of_rows(pack(sequences, backbone.pad_id, min_shared=0.2))
    assert (shared - plain).abs().max() < 1e-4 * plain.abs().max()
    assert backbone.rows_differ() is None


@pytest.fixture(scope="module")
def model_directory(tiny_llama_path, tmp_path_factory):
    """`model_directory("mistral", sliding_window=4)`: a random model of a kind, with the tokenizer of tiny_llama."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    def make(kind, **options):
        tokenizer = AutoTokenizer.from_pretrained(tiny_llama_path)
        sizes = {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": len(tokenizer),
        }  # fmt: skip
        config = AutoConfig.for_model(kind, **{**sizes, **options})
        path = tmp_path_factory.mktemp("models") / kind
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return str(path)

    return make


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("gemma2", {"sliding_window": 4, "head_dim": 16}),
        ("gpt_neox", {}),
    ],
)
def test_other_families_give_the_same_features(model_directory, kind, options):
    name = model_directory(kind, **options)
    backbone = open_backbone(name, dtype="float32")
    sequences = some_sequences(2, vocabulary=4000)
    with torch.no_grad():
        plain = torch.cat([backbone(*pad_batch([s], backbone.pad_id)) for s in sequences])
        shared = backbone.features_of_rows(pack(sequences, backbone.pad_id, min_shared=0.2))
    assert (shared - plain).abs().max() < 1e-4 * plain.abs().max()
    assert backbone.rows_differ() is None


def test_a_sliding_window_is_heeded(model_directory, monkeypatch):
    """Without the window in the mask, the features differ, so the test above can fail."""
    backbone = open_backbone(model_directory("mistral", sliding_window=4), dtype="float32")
    monkeypatch.setattr(backbone.model.config, "sliding_window", None)
    sequences = some_sequences(2, vocabulary=4000)
    with torch.no_grad():
        wide = backbone.features_of_rows(pack(sequences, backbone.pad_id))
    monkeypatch.setattr(backbone.model.config, "sliding_window", 4)
    with torch.no_grad():
        narrow = backbone.features_of_rows(pack(sequences, backbone.pad_id))
    assert (wide - narrow).abs().max() > 1e-3 * narrow.abs().max()


def test_an_encoder_is_refused_with_the_reason(minilm_path):
    backbone = open_backbone(str(minilm_path), dtype="float32", pooling="mean")
    assert "bidirectional encoder" in str(backbone.rows_differ())
    with pytest.raises(UserError, match=r"bidirectional encoder.*use padded"):
        backbone.features_of_rows(pack([(1, 2, 3)], 0))


def test_layers_that_no_mask_keeps_apart_are_refused(backbone, monkeypatch):
    monkeypatch.setattr(backbone.model.config, "layer_types", ["full_attention", "linear_attention"], raising=False)
    assert "linear_attention" in str(backbone.rows_problem())


def test_a_model_that_ignores_the_mask_is_found_out(tiny_llama_path, monkeypatch):
    backbone = open_backbone(str(tiny_llama_path), dtype="float32")
    assert backbone.rows_differ() is None
    blind = lambda until, *_: torch.ones(len(until), 1, until.shape[1], until.shape[1]).tril().bool()  # noqa: E731
    monkeypatch.setattr(packing, "attention_mask", blind)
    assert "other features" in str(backbone.rows_differ())


@pytest.mark.slow
def test_flex_attention_gives_the_same_features(tiny_llama_path):
    """Compiled for the CPU, which has the forward alone; training with it needs CUDA."""
    backbone = with_random_adapter(str(tiny_llama_path))
    batch = pack(some_sequences(4, vocabulary=4000), 0, multiple_of=128)
    with torch.no_grad():
        plain = backbone.features_of_rows(batch)
        backbone.use_attention("flex_attention")
        flex = backbone.features_of_rows(batch)
    assert (flex - plain).abs().max() < 1e-4 * plain.abs().max()
    assert packing.flex_problem(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention trains on CUDA devices alone")
def test_flex_attention_trains_on_cuda(tiny_llama_path):
    device = torch.device("cuda")
    assert packing.flex_problem(device) is None
    batch = {k: v.to(device) for k, v in pack(some_sequences(4, vocabulary=4000), 0, multiple_of=128).items()}
    results = []
    for attention in ("sdpa", "flex_attention"):
        backbone = with_random_adapter(str(tiny_llama_path)).to(device)
        backbone.use_attention(attention)
        features = backbone.features_of_rows(batch)
        features.square().sum().backward()
        results.append([features.detach(), *(p.grad for p in backbone.parameters() if p.requires_grad)])
    for plain, flex in zip(*results, strict=True):
        assert (flex - plain).abs().max() < 1e-3 * plain.abs().max()
