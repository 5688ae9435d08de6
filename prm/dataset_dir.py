"""The dataset directory: what `prm data build` writes and everything else reads.

    dataset.json         schema version, name, source, licence, synthetic?, counts, seed, split rule, fingerprints
    pairs.parquet        preference pairs (records.PAIR_SCHEMA)
    completions.parquet  prompts with the user's own text (records.COMPLETION_SCHEMA)
    users.parquet        users (records.USER_SCHEMA)

Users never cross: pairs of `train` users stand in train, validation and test_seen; pairs of `adapt` users in support
and test.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prm import records, store
from prm.errors import UserError
from prm.records import ADAPT_SPLITS, TRAIN_SPLITS, Completion, PreferencePair, RowProblem, User

SCHEMA_VERSION = 1
SPLIT_RULES = ("prompt", "dialog", "pair")
_FILES = {
    "pairs.parquet": records.PAIR_SCHEMA,
    "completions.parquet": records.COMPLETION_SCHEMA,
    "users.parquet": records.USER_SCHEMA,
}


def write_dataset(
    out: str | Path,
    *,
    name: str,
    pairs: Sequence[PreferencePair],
    completions: Sequence[Completion],
    users: Sequence[User],
    source: str,
    licence: str,
    seed: int,
    split_rule: str = "prompt",
    synthetic: bool = False,
    counts: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    extra_files: dict[str, bytes] | None = None,
    overwrite: bool = False,
) -> DatasetDir:
    """Check the records, write the directory atomically, reopen it and return it.

    Args:
        name: short name of the dataset, such as "pref-lamp".
        source, licence: where the rows come from and under which terms.
        synthetic: set when the texts or the preferences were made up by a program; every result built on it says so.
        counts: what the builder counted (rows read, removed and why); the counts of the rows written are added.
        arguments: the options the builder ran with.
        extra_files: further files by name, such as planted tastes kept for tests.
        overwrite: replace an existing directory; without it one that is not empty is refused.

    Raises:
        UserError: nothing to write, or a record is wrong.
    """
    if not pairs and not completions:
        raise UserError(f"the dataset {name} would be empty: no row was left after filtering")
    if split_rule not in SPLIT_RULES:
        raise ValueError(f"split_rule {split_rule!r}, one of {SPLIT_RULES} is needed")
    problems = _record_problems(str(out), pairs, completions, users)
    if problems:
        raise UserError(f"{len(problems)} bad records, the first: {problems[0]}")
    tables = {
        "pairs.parquet": records.pairs_table(pairs),
        "completions.parquet": records.completions_table(completions),
        "users.parquet": records.users_table(users),
    }
    with store.atomic_directory(out, overwrite=overwrite) as directory:
        for file, table in tables.items():
            store.write_table(directory / file, table)
        for file, data in (extra_files or {}).items():
            store.write_bytes(directory / file, data)
        info = {
            "schema_version": SCHEMA_VERSION,
            "name": name,
            "source": source,
            "licence": licence,
            "synthetic": synthetic,
            "seed": seed,
            "split_rule": split_rule,
            "arguments": arguments or {},
            "counts": {**(counts or {}), **_row_counts(pairs, completions, users)},
            "fingerprints": {file: store.fingerprint_file(directory / file) for file in tables},
        }
        store.write_json(directory / "dataset.json", info)
        DatasetDir.open(directory)
    return DatasetDir.open(out)


def split_warning(split_rule: str | None) -> str | None:
    """The warning that goes with results on data split by this rule, or None.

    Only splits by pair need one: a scorer can learn which response to a prompt is good, and meet that prompt again.
    """
    if split_rule != "pair":
        return None
    return (
        "split by pair: prompts, and responses to them, stand on both sides of a user's splits, "
        "so these figures say nothing about new prompts"
    )


def _row_counts(
    pairs: Sequence[PreferencePair], completions: Sequence[Completion], users: Sequence[User]
) -> dict[str, dict[str, int]]:
    return {
        "pairs": dict(sorted(Counter(p.split for p in pairs).items())),
        "completions": dict(sorted(Counter(c.split for c in completions).items())),
        "users": dict(sorted(Counter(u.role for u in users).items())),
    }


class DatasetDir:
    """A dataset directory opened for reading."""

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        self.info = info

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> DatasetDir:
        """Open a directory; `verify` compares every file with the fingerprint written when it was built.

        Raises:
            UserError: not a dataset directory, another schema version, or a file changed since it was written.
        """
        path = Path(path)
        file = path / "dataset.json"
        if not path.is_dir():
            raise UserError(f"no dataset directory at {path}: make one with `prm data build ... --out {path}`")
        if not file.is_file():
            raise UserError(
                f"{path} holds no dataset.json: it is not a dataset directory (see `prm data build --help`)"
            )
        try:
            info = json.loads(file.read_text(encoding="utf-8"))
            version, prints = info["schema_version"], dict(info["fingerprints"])
            if not isinstance(info["name"], str) or not isinstance(info["synthetic"], bool):
                raise ValueError("name must be a text and synthetic true or false")
            if info["split_rule"] not in SPLIT_RULES:
                raise ValueError(f"split_rule {info['split_rule']!r}, one of {SPLIT_RULES} is needed")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is damaged ({error}): build the dataset again") from error
        if version != SCHEMA_VERSION:
            raise UserError(f"{file} has schema version {version}, this prm reads {SCHEMA_VERSION}: build it again")
        for name in _FILES:
            if not (path / name).is_file():
                raise UserError(f"{path / name} is missing: build the dataset again")
            if verify and store.fingerprint_file(path / name) != prints.get(name):
                raise UserError(
                    f"{path / name} changed since it was written: run `prm data check {path}`, or build it again"
                )
        return cls(path, info)

    @property
    def name(self) -> str:
        return str(self.info["name"])

    @property
    def synthetic(self) -> bool:
        return bool(self.info["synthetic"])

    @property
    def split_rule(self) -> str:
        """What never crosses a user's splits: one of SPLIT_RULES."""
        return str(self.info["split_rule"])

    @property
    def split_warning(self) -> str | None:
        """What every result built on this directory has to say about its splits, or None."""
        return split_warning(self.split_rule)

    @property
    def fingerprint(self) -> str:
        """One sha256 over the fingerprints of all files."""
        return store.fingerprint(self.info["fingerprints"])

    def _table(self, name: str) -> pa.Table:
        try:
            return pq.read_table(self.path / name, schema=_FILES[name])
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self.path / name} cannot be read: {str(error).splitlines()[0]}") from error

    def pairs(self, splits: Iterable[str] | None = None) -> list[PreferencePair]:
        """Preference pairs of these splits (all splits without an argument), in file order."""
        wanted = _wanted(splits)
        return [p for p in records.pairs_from_table(self._table("pairs.parquet")) if p.split in wanted]

    def completions(self, splits: Iterable[str] | None = None) -> list[Completion]:
        """Completions of these splits (all splits without an argument), in file order."""
        wanted = _wanted(splits)
        return [c for c in records.completions_from_table(self._table("completions.parquet")) if c.split in wanted]

    def users(self, role: str | None = None) -> list[User]:
        """Users of one role, or all."""
        return [u for u in records.users_from_table(self._table("users.parquet")) if role in (None, u.role)]

    def all_records(self) -> tuple[list[PreferencePair], list[Completion], list[User]]:
        """All rows of the three files, unknown splits included."""
        return (
            records.pairs_from_table(self._table("pairs.parquet")),
            records.completions_from_table(self._table("completions.parquet")),
            self.users(),
        )


def _wanted(splits: Iterable[str] | None) -> set[str]:
    wanted = set(records.SPLITS if splits is None else [splits] if isinstance(splits, str) else splits)
    if unknown := wanted - set(records.SPLITS):
        raise ValueError(f"unknown split {sorted(unknown)}, splits are {records.SPLITS}")
    return wanted


def _record_problems(
    place: str, pairs: Sequence[PreferencePair], completions: Sequence[Completion], users: Sequence[User]
) -> list[RowProblem]:
    """Every problem of the records, row by row and then across rows. Lines count rows from 1."""
    problems: list[RowProblem] = []
    roles = {u.user_id: u.role for u in users}

    def rows(file: str, items: Sequence[Any], key: str, check: Callable[[Any], list[tuple[str, str]]]) -> None:
        seen: dict[str, int] = {}
        for line, item in enumerate(items, 1):
            found = list(check(item))
            identity = getattr(item, key)
            if identity in seen:
                found.append((key, f"{identity!r} stands in row {seen[identity]} too"))
            seen.setdefault(identity, line)
            if key != "user_id":
                role = roles.get(item.user_id)
                allowed = {"train": TRAIN_SPLITS, "adapt": ADAPT_SPLITS}.get(role or "", ())
                if role is None:
                    found.append(("user_id", f"{item.user_id!r} is not in users.parquet"))
                elif item.split in records.SPLITS and item.split not in allowed:
                    found.append(("split", f"{item.split!r} is not for a user of role {role!r}"))
            problems.extend(
                RowProblem(f"{place}/{file}", line, name, reason, repr(item)[:200]) for name, reason in found
            )

    rows("users.parquet", users, "user_id", records.user_problems)
    rows("pairs.parquet", pairs, "pair_id", records.pair_problems)
    rows("completions.parquet", completions, "example_id", records.completion_problems)
    return problems


def check_dataset(path: str | Path) -> list[RowProblem]:
    """Every bad row of a dataset directory: file, row, field, reason. An empty list means it is sound.

    Raises:
        UserError: the directory cannot be opened at all.
    """
    data = DatasetDir.open(path, verify=False)
    pairs, completions, users = data.all_records()
    problems = _record_problems(str(path), pairs, completions, users)
    for name in _FILES:
        if store.fingerprint_file(data.path / name) != data.info["fingerprints"].get(name):
            problems.append(
                RowProblem(str(data.path / name), 0, "file", "its fingerprint is not the one in dataset.json")
            )
    if not pairs and not completions:
        problems.append(RowProblem(str(data.path), 0, "rows", "the dataset is empty"))
    problems += _crossings(str(data.path / "pairs.parquet"), pairs, data.split_rule)
    return problems


def _crossings(file: str, pairs: Sequence[PreferencePair], split_rule: str) -> list[RowProblem]:
    """Prompts of one user that stand in two splits; the same pair, whichever was chosen, when `split_rule` is pair."""
    first: dict[tuple[str, str], str] = {}
    found = []
    for line, pair in enumerate(pairs, 1):
        responses = sorted(map(str, (pair.chosen, pair.rejected))) if split_rule == "pair" else []
        key = (pair.user_id, store.fingerprint([pair.prompt, responses]))
        split = first.setdefault(key, pair.split)
        if split != pair.split:
            what = "pair of responses" if split_rule == "pair" else "prompt"
            found.append(RowProblem(file, line, "split", f"this user's {what} stands in {split} too"))
    return found
