"""Preference pairs of a dataset directory as token batches, for every reward model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from prm.backbones import is_encoder, open_tokenizer
from prm.dataset_dir import DatasetDir
from prm.errors import UserError
from prm.features import pad_batch
from prm.formatting import Formatter
from prm.packing import pack
from prm.records import PreferencePair
from prm.store import canonical_json
from prm.training.samplers import CoveringBatchSampler, GroupedBatchSampler

log = logging.getLogger(__name__)
# Which split of a dataset directory serves which loader. The adaptation users' splits are never read here.
LOADER_SPLITS = {"train": "train", "validation": "validation", "test": "test_seen"}


@dataclass
class RowOptions:
    """How the texts of a batch become rows of tokens.

    Attributes:
        layout: "padded", a row for each text; "packed", rows filled with texts; "shared", and with prefixes once.
        min_shared, row_tokens, multiple_of: see `packing.pack`.
    """

    layout: str
    min_shared: float = 0.5
    row_tokens: int = 2048
    multiple_of: int = 1


class PairTokens(Dataset[int]):
    """Token ids of the pairs of one split; every distinct (prompt, response) is encoded and kept once.

    An item is the pair's own index, so a batch of items is a batch of sample ids for `collate`.

    Args:
        pairs: the pairs, N.
        user_index: user id -> row of the user table.
        weights: user id -> weight of each of the user's pairs.
        formatter: from texts to token ids; counts what it cuts.
        pad_id: padding id.
        rows: how texts become rows, for `collate`.

    Attributes:
        sequences: token ids of the distinct texts, in order of appearance.
        groups, lengths: prompt of each pair, and its longer text's tokens, for the samplers.
        features: features [sequences, d] of the texts, which batches then hold in place of token ids; None without.
    """

    def __init__(
        self,
        pairs: Sequence[PreferencePair],
        user_index: dict[str, int],
        weights: dict[str, float],
        formatter: Formatter,
        pad_id: int,
        rows: RowOptions | None = None,
    ) -> None:
        self.pad_id = pad_id
        self.rows = rows or RowOptions("padded")
        self.features: np.ndarray | None = None
        self.sequences: list[tuple[int, ...]] = []
        self.groups: list[str] = []
        known: dict[tuple[str, str], int] = {}
        columns: list[tuple[int, int, int]] = []

        def row(pair: PreferencePair, prompt: str, response: str) -> int:
            if (prompt, response) not in known:
                known[prompt, response] = len(self.sequences)
                self.sequences.append(formatter.encode(pair.prompt, response).ids)
            return known[prompt, response]

        for pair in pairs:
            prompt = canonical_json(pair.prompt)
            self.groups.append(prompt)
            columns.append((row(pair, prompt, pair.chosen), row(pair, prompt, pair.rejected), user_index[pair.user_id]))
        self._columns = columns
        self.lengths = [max(len(self.sequences[c]), len(self.sequences[r])) for c, r, _ in columns]
        self._weights = [weights[pair.user_id] for pair in pairs]

    def __len__(self) -> int:
        return len(self._columns)

    def __getitem__(self, index: int) -> int:
        return index

    def text_numbers(self, sample_ids: Sequence[int]) -> list[int]:
        """Numbers of the distinct texts of pairs, in order of appearance."""
        return list(dict.fromkeys(number for i in sample_ids for number in self._columns[i][:2]))

    def collate(self, sample_ids: Sequence[int]) -> dict[str, Tensor]:
        """A batch of N pairs over their M distinct texts.

        Returns:
            The texts, in one of three forms: input_ids, attention_mask [M, T], padded on the right; or rows as
            `packing.pack` makes them; or features [M, d]. And the pairs: chosen, rejected [N], numbers of texts;
            user_index [N]; weight [N]; sample_ids [N].
        """
        chosen, rejected, users = zip(*(self._columns[i] for i in sample_ids), strict=True)
        numbers = self.text_numbers(sample_ids)
        place = {number: row for row, number in enumerate(numbers)}
        return {
            **self._texts(numbers),
            "chosen": torch.tensor([place[row] for row in chosen]),
            "rejected": torch.tensor([place[row] for row in rejected]),
            "user_index": torch.tensor(users),
            "weight": torch.tensor([self._weights[i] for i in sample_ids]),
            "sample_ids": torch.tensor(list(sample_ids)),
        }

    def _texts(self, numbers: list[int]) -> dict[str, Tensor]:
        if self.features is not None:
            return {"features": torch.from_numpy(np.array(self.features[numbers], dtype=np.float32))}
        sequences = [self.sequences[n] for n in numbers]
        if self.rows.layout == "padded":
            input_ids, attention_mask = pad_batch(sequences, self.pad_id)
            return {"input_ids": input_ids, "attention_mask": attention_mask}
        return pack(
            sequences,
            self.pad_id,
            layout=self.rows.layout,
            min_shared=self.rows.min_shared,
            row_tokens=self.rows.row_tokens,
            multiple_of=self.rows.multiple_of,
        )


class PreferenceDataModule(LightningDataModule):
    """Pairs of the training users: train, validation and test_seen.

    Args:
        data: dataset directory, as `prm data build` writes it.
        backbone: whose tokenizer to use; the command line takes it from model.backbone.
        revision: of a hub id; the command line takes it from model.revision.
        batch_size: pairs per rank and step. A pair is two sequences, less those that pairs of one prompt share.
        eval_batch_size: pairs per rank and evaluation step.
        max_length: most tokens of prompt and response; longer prompts are cut from the left, and counted.
        num_workers: processes that build batches; 0 is enough, since tokens are ready in memory.
        seed: of the order of training pairs.
        layout: shared computes what texts begin with in common once, packed fills rows with whole texts, padded gives
            each text a row. All three train the same. auto takes shared where the backbone allows it.
        min_shared: texts share a prefix when it is at least this part of the shorter text.
        row_tokens: most tokens of texts that share one row; more = fewer repeated prefixes, longer attention.
        length_bucketing: texts of similar length in one step: less padding, and an order that is a little less random.
        cached_features: compute the frozen backbone's features once, by transformers or vllm, and train on these;
            null computes them in every step, as an adapter needs.
        pooling: of cached features; the command line takes it from model.pooling.
        dtype: of cached features' backbone; the command line takes it from model.dtype.
    """

    def __init__(
        self,
        data: str,
        backbone: str,
        revision: str | None = None,
        batch_size: int = 8,
        eval_batch_size: int = 16,
        max_length: int = 512,
        num_workers: int = 0,
        seed: int = 0,
        layout: Literal["auto", "shared", "packed", "padded"] = "auto",
        min_shared: float = 0.5,
        row_tokens: int = 2048,
        length_bucketing: bool = True,
        cached_features: Literal["transformers", "vllm"] | None = None,
        pooling: str = "last",
        dtype: str = "auto",
    ) -> None:
        super().__init__()
        if batch_size < 1 or eval_batch_size < 1:
            raise UserError("data.batch_size and data.eval_batch_size must be 1 or more")
        if not 0 <= min_shared <= 1:
            raise UserError(f"data.min_shared {min_shared}: a part between 0 and 1 is needed")
        self.directory = DatasetDir.open(data)
        self.backbone, self.revision = backbone, revision
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.max_length, self.num_workers, self.seed = max_length, num_workers, seed
        self.layout, self.length_bucketing = layout, length_bucketing
        self.rows = RowOptions("shared" if layout == "auto" else layout, min_shared, row_tokens)
        self.cached_features, self.pooling, self.dtype = cached_features, pooling, dtype
        #: Whether `setup` leaves cached features alone, for a run that is only planned.
        self.plan_only = False
        #: Steps of the first epoch that the training loader leaves out, for a run that is resumed: (epoch, steps).
        self.resume_at = (0, 0)
        self.user_ids: list[str] = []
        self.pairs_per_user: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self._tokens: dict[str, PairTokens] = {}
        self._formatter: Formatter | None = None
        self._read: tuple[str, ...] = ()

    @property
    def formatter(self) -> Formatter:
        """From texts to token ids; there after `setup`."""
        assert self._formatter is not None, "setup() was not called"
        return self._formatter

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the dataset directory."""
        return self.directory.fingerprint

    def setup(self, stage: str) -> None:
        """Read the pairs, number the users and encode every distinct text: train and validation to fit, all to test.

        Raises:
            UserError: no training pairs, or a response longer than max_length.
        """
        names = ("train", "validation") if stage == "fit" else tuple(LOADER_SPLITS)
        if set(names) <= set(self._read):
            return
        self._read = names
        pairs = {name: self.directory.pairs([LOADER_SPLITS[name]]) for name in names}
        if not pairs["train"]:
            raise UserError(f"{self.directory.path} holds no training pairs: build it with training users")
        self.pairs_per_user = dict(sorted(Counter(p.user_id for p in pairs["train"]).items()))
        self.user_ids = list(self.pairs_per_user)
        user_index = {user: row for row, user in enumerate(self.user_ids)}
        weights = user_weights(self.pairs_per_user)
        tokenizer = open_tokenizer(self.backbone, self.revision)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        encoder = is_encoder(self.backbone, self.revision)
        if encoder and self.layout == "auto":
            self.rows.layout = "padded"
        self._formatter = Formatter(tokenizer, self.max_length, encoder=encoder)
        for name, rows in pairs.items():
            known = [p for p in rows if p.user_id in user_index]
            self.counts[f"{name}_pairs"] = len(known)
            self.counts[f"{name}_pairs_of_untrained_users"] = len(rows) - len(known)
            if known:
                self._tokens[name] = PairTokens(known, user_index, weights, self._formatter, pad_id, self.rows)
        self.counts["users"] = len(self.user_ids)
        self.counts["sequences"] = sum(len(t.sequences) for t in self._tokens.values())
        self.counts["cut_sequences"] = self._formatter.cut_rows
        self.counts["cut_tokens"] = self._formatter.cut_tokens
        if self.cached_features is not None and not self.plan_only:
            self._read_features()

    def _read_features(self) -> None:
        """Take the texts' features from the cache; all ranks together compute what it lacks."""
        from prm.frozen_features import backbone_features

        found = backbone_features(
            self.backbone,
            self.revision,
            data=self.directory,
            sequences={LOADER_SPLITS[name]: tokens.sequences for name, tokens in self._tokens.items()},
            formatter=self.formatter,
            pooling=self.pooling,
            dtype=self.dtype,
            engine=str(self.cached_features),
        )
        for name, tokens in self._tokens.items():
            tokens.features = found[LOADER_SPLITS[name]]

    def split_tokens(self, name: str) -> PairTokens | None:
        """Tokens of "train", "validation" or "test" after `setup`; None when the split has no pairs."""
        return self._tokens.get(name)

    def summary(self) -> str:
        """One line on what was read, left out and cut."""
        c = self.counts
        pairs = ", ".join(f"{c[f'{name}_pairs']} {LOADER_SPLITS[name]}" for name in self._read)
        line = (
            f"{self.directory.name}: {c['users']} users; pairs: {pairs}; {c['cut_sequences']} of {c['sequences']} "
            f"distinct texts cut to {self.max_length} tokens"
        )
        untrained = sum(c[f"{name}_pairs_of_untrained_users"] for name in self._read)
        line += f"; {untrained} pairs of users without training pairs left out" if untrained else ""
        return line + (f"; {self.directory.split_warning}" if self.directory.split_warning else "")

    def train_dataloader(self) -> DataLoader[Any]:
        rank, num_ranks = self._ranks()
        sampler = self.train_sampler(rank, num_ranks, self.trainer.accumulate_grad_batches if self.trainer else 1)
        tokens = self._tokens["train"]
        if sampler.num_left_out and rank == 0:
            log.info(
                "%d of %d training pairs are left out of each epoch, others each time: they do not fill a step of %d",
                sampler.num_left_out,
                len(tokens),
                sampler.pairs_per_step,
            )
        return self._loader(tokens, sampler)

    def train_sampler(self, rank: int, num_ranks: int, accumulate: int) -> GroupedBatchSampler:
        """Batches of training pairs of one rank; there after `setup`."""
        tokens = self._tokens["train"]
        return GroupedBatchSampler(
            tokens.groups,
            self.batch_size,
            lengths=tokens.lengths if self.length_bucketing else None,
            rank=rank,
            num_ranks=num_ranks,
            accumulate=accumulate,
            seed=self.seed,
            resume_at=self.resume_at,
        )

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> DataLoader[Any] | list[Any]:
        return self._evaluation_loader("test")

    def _evaluation_loader(self, name: str) -> DataLoader[Any] | list[Any]:
        if name not in self._tokens:
            return []
        rank, num_ranks = self._ranks()
        tokens = self._tokens[name]
        return self._loader(
            tokens, CoveringBatchSampler(tokens.groups, self.eval_batch_size, rank=rank, num_ranks=num_ranks)
        )

    def _loader(self, tokens: PairTokens, sampler: Any) -> DataLoader[Any]:
        return DataLoader(
            tokens,
            batch_sampler=sampler,
            collate_fn=tokens.collate,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)


def user_weights(pairs_per_user: dict[str, int]) -> dict[str, float]:
    """Weight of each pair of a user, N / (U n_u), with N pairs, U users and n_u pairs of this user.

    The mean over all pairs of weight * loss is then the mean over users of each user's mean loss, and the mean over a
    uniformly drawn minibatch estimates it without bias.
    """
    total, users = sum(pairs_per_user.values()), len(pairs_per_user)
    return {user: total / (users * count) for user, count in pairs_per_user.items()}
