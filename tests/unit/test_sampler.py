import itertools

import pytest

from prm.errors import UserError
from prm.training.samplers import CoveringBatchSampler, GroupedBatchSampler

GROUPS = [index // 3 for index in range(60)]  # 20 prompts with 3 pairs each


def steps(num_ranks: int, batch_size: int, epoch: int = 0, groups=GROUPS, seed: int = 0) -> list[list[list[int]]]:
    """Batches by step and rank."""
    samplers = [
        GroupedBatchSampler(groups, batch_size, rank=rank, num_ranks=num_ranks, seed=seed) for rank in range(num_ranks)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(step) for step in zip(*samplers, strict=True)]


def test_every_rank_has_the_same_number_of_full_batches_and_no_pair_twice():
    batches = steps(3, 4)
    assert len(batches) == 60 // 12
    flat = [i for step in batches for batch in step for i in batch]
    assert all(len(batch) == 4 for step in batches for batch in step)
    assert sorted(flat) == sorted(set(flat))
    assert len(flat) == 60


def test_two_ranks_see_in_a_step_what_one_rank_sees_in_two():
    two = [batch for step in steps(2, 5) for batch in step]
    one = [batch for step in steps(1, 5) for batch in step]
    assert two == one


def test_accumulated_steps_are_full():
    sampler = GroupedBatchSampler(list(range(23)), 3, accumulate=2)
    assert len(sampler) == len(list(sampler)) == 6
    assert sampler.num_left_out == 5


def test_pairs_of_a_prompt_stay_together():
    flat = [i for (batch,) in steps(1, 6) for i in batch]
    order = [GROUPS[i] for i in flat]
    blocks = [order[i : i + 3] for i in range(0, 60, 3)]
    assert all(len(set(block)) == 1 for block in blocks)


def test_the_shuffle_depends_on_seed_and_epoch_alone():
    assert steps(2, 4, epoch=1) == steps(2, 4, epoch=1)
    assert steps(2, 4, epoch=1) != steps(2, 4, epoch=2)
    assert steps(2, 4, seed=1) != steps(2, 4, seed=2)


def test_what_does_not_fill_a_step_is_left_out_and_counted_but_not_for_good():
    groups = list(range(23))
    sampler = GroupedBatchSampler(groups, 4, rank=0, num_ranks=2)
    assert sampler.num_left_out == 7
    seen = set()
    for epoch in range(20):
        seen |= {i for step in steps(2, 4, epoch=epoch, groups=groups) for batch in step for i in batch}
    assert seen == set(groups)


# Length buckets

LENGTHS = [10 + (index // 3 * 37) % 91 for index in range(300)]
MANY = [index // 3 for index in range(300)]


def bucketed(num_ranks: int, accumulate: int, epoch: int = 0, **options) -> list[list[int]]:
    """Pairs of each step, all ranks and accumulated batches together."""
    samplers = [
        GroupedBatchSampler(
            MANY, 4, lengths=LENGTHS, rank=r, num_ranks=num_ranks, accumulate=accumulate, seed=3, **options
        )
        for r in range(num_ranks)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    flat = [i for step in zip(*samplers, strict=True) for batch in step for i in batch]
    return [flat[i : i + 4 * num_ranks * accumulate] for i in range(0, len(flat), 4 * num_ranks * accumulate)]


def test_steps_of_similar_length_are_padded_less():
    def padding(steps_):
        return sum(len(s) * max(LENGTHS[i] for i in s) for s in steps_) / sum(LENGTHS[i] for s in steps_ for i in s)

    plain = GroupedBatchSampler(MANY, 16, seed=3)
    assert padding(bucketed(1, 4)) < 0.8 * padding(list(plain))


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_buckets_lose_and_repeat_nothing_and_do_not_depend_on_ranks(epoch):
    one, two, four = bucketed(1, 4, epoch), bucketed(2, 2, epoch), bucketed(4, 1, epoch)
    assert one == two == four
    flat = [i for step in one for i in step]
    assert len(one) == 300 // 16
    assert len(flat) == len(set(flat)) == 288
    assert bucketed(1, 4, epoch) != bucketed(1, 4, epoch + 1)


def test_what_buckets_leave_out_has_no_typical_length():
    left = {epoch: set(range(300)) - {i for step in bucketed(1, 4, epoch) for i in step} for epoch in range(8)}
    assert len({frozenset(pairs) for pairs in left.values()}) == 8
    lengths = [LENGTHS[i] for pairs in left.values() for i in pairs]
    assert 0.7 < (sum(lengths) / len(lengths)) / (sum(LENGTHS) / len(LENGTHS)) < 1.3


def test_a_prompt_stays_together_in_a_bucket():
    flat = [MANY[i] for step in bucketed(1, 4) for i in step]
    blocks = sum(1 for a, b in itertools.pairwise(flat) if a != b) + 1
    # A prompt may go on in the next step, or the next stretch; scattered pairs would make 288 blocks.
    assert blocks <= len(set(flat)) + 300 // 16 + 4


# Going on


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_a_resumed_epoch_gives_the_rest_of_its_batches_and_later_ones_all(lengths):
    def batches(resume_at, epoch):
        sampler = GroupedBatchSampler(MANY, 4, lengths=lengths, accumulate=2, seed=3, resume_at=resume_at)
        sampler.set_epoch(epoch)
        return list(sampler), len(sampler)

    whole, length = batches((0, 0), 1)
    rest, same_length = batches((1, 5), 1)
    assert rest == whole[10:]
    assert length == same_length == len(whole)
    assert batches((1, 5), 2)[0] == batches((0, 0), 2)[0]


def test_too_few_pairs_for_one_step_names_the_option():
    with pytest.raises(UserError, match=r"data\.batch_size"):
        GroupedBatchSampler([0, 1, 2], 2, rank=0, num_ranks=2)


@pytest.mark.parametrize("num_pairs", [1, 2, 3, 7, 16, 33])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_evaluation_covers_all_pairs_with_equal_counts(num_pairs, num_ranks):
    groups = [i // 2 for i in range(num_pairs)]
    ranks = [list(CoveringBatchSampler(groups, 4, rank=r, num_ranks=num_ranks)) for r in range(num_ranks)]
    assert {len(batches) for batches in ranks} == {-(-num_pairs // (4 * num_ranks))}
    assert all(0 < len(batch) <= 4 for batches in ranks for batch in batches)
    flat = [i for batches in ranks for batch in batches for i in batch]
    assert set(flat) == set(range(num_pairs))
    if num_pairs >= len(ranks[0]) * num_ranks:
        assert len(flat) == num_pairs


def test_evaluating_nothing_is_an_error():
    with pytest.raises(UserError, match="no pairs"):
        CoveringBatchSampler([], 4)


def test_lightning_finds_set_epoch():
    from lightning.fabric.utilities.data import _set_sampler_epoch
    from torch.utils.data import DataLoader

    loader = DataLoader(range(60), batch_sampler=GroupedBatchSampler(GROUPS, 4))
    before = [list(map(int, batch)) for batch in loader]
    _set_sampler_epoch(loader, 3)
    assert [list(map(int, batch)) for batch in loader] != before
