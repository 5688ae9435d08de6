"""The same training expressed in two ways gives the same losses, weights and validation figures."""

import pytest

from prm.store import Cache


def test_the_reference_trains(method, train, reference, assert_same):
    """And another training is another one, so that the tests below can fail."""
    plain = reference(method)
    assert len(plain.losses) == 6
    assert plain.losses[-1] != plain.losses[0]
    with pytest.raises(AssertionError):
        assert_same(plain, train(method, layout="padded", seed=1), 1e-5)


def test_accumulated_batches_are_one_batch(method, train, reference, assert_same):
    assert_same(reference(method), train(method, batch_size=4, accumulate=2, layout="padded"), 1e-5)


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_rows_are_padded_texts(method, train, reference, assert_same, layout):
    assert_same(reference(method), train(method, layout=layout), 1e-5)


def test_short_rows_are_long_rows(method, train, reference, assert_same):
    assert_same(reference(method), train(method, layout="shared", row_tokens=60, min_shared=0.0), 1e-5)


def test_recomputed_activations_are_kept_ones(method, train, reference, assert_same):
    checkpointed = train(method, layout="padded", model={"gradient_checkpointing": True})
    assert_same(reference(method), checkpointed, 1e-5)


def test_cached_features_are_live_ones(method, train, reference, assert_same, tmp_path, monkeypatch):
    monkeypatch.setenv("PRM_CACHE", str(tmp_path))
    cached = train(method, lora=False, cached_features="transformers")
    assert list(Cache("features").root.iterdir())
    assert_same(reference(method, lora=False), cached, 1e-5)
