"""A bidirectional model as functions of texts: fills masks, embeds, classifies.

Dimensions: B texts of a batch, T tokens, D model width, M masks of a text, V vocabulary.
A text becomes `[CLS] text [SEP]`, with the special tokens of its training (data/tokenizers/masking_tokens.py).
"""

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from megajax.data.samples.classification import encode_words, joined
from megajax.data.tokenizers.masking_tokens import SPELLINGS, masking_tokens
from megajax.inference.config import Pooling
from megajax.inference.load import OpenedModel
from megajax.inference.shapes import laid_out, power_of_two, text_batches
from megajax.mesh.sharding import constrain, replicated

MASK = re.compile("|".join(map(re.escape, SPELLINGS["mask_id"])))


class Candidate(NamedTuple):
    """A token that may fill a mask."""

    token: str
    probability: float


class Classified(NamedTuple):
    """The most likely class of a text or a word, and the probabilities of all classes by name."""

    label: str
    probabilities: dict[str, float]


class TextEncoder:
    """An opened model with its weights; each method takes any number of texts."""

    def __init__(self, opened: OpenedModel):
        """Loads the weights."""
        self.model = opened.model
        self.mesh = opened.mesh
        self.tokenizer = opened.tokenizer
        self.special = masking_tokens(opened.tokenizer)
        self._params = opened.restore()
        self._source = opened.source
        self._embed = jax.jit(functools.partial(_embed, self.model), static_argnames="pooling")

    def fill(self, texts: Sequence[str], top_k: int) -> list[list[list[Candidate]]]:
        """For each [MASK] (or <mask>) of each text the most likely tokens. Raises ValueError for a text without one."""
        self._check("fill")
        encoded = [self._encode_masked(text) for text in texts]
        places = [[place for place, token in enumerate(ids, 1) if token == self.special.mask_id] for ids in encoded]
        for number, found in enumerate(places):
            if not found:
                raise ValueError(f"text {number + 1} has no mask; write [MASK] for each token to fill in")
        top_k = min(top_k, self.model.config.vocab_size)
        most = power_of_two(max(map(len, places)))
        program = jax.jit(functools.partial(_fill, self.model, top_k=top_k))

        def run(batch: dict, rows: list[int], index_of: np.ndarray):
            where = np.zeros((len(batch["tokens"]), most), np.int32)
            for row, number in enumerate(rows):
                where[row, : len(places[number])] = index_of[places[number]]
            return program(self._params, batch, where)

        found = self._run([(ids,) for ids in encoded], run)
        return [
            [
                [Candidate(self._shown(token), float(p)) for token, p in zip(ids, chances, strict=True)]
                for ids, chances in zip(tokens[: len(where)], probabilities[: len(where)], strict=True)
            ]
            for (tokens, probabilities), where in zip(found, places, strict=True)
        ]

    def embed(self, texts: Sequence[str], pooling: Pooling) -> np.ndarray:
        """float32 [texts, D]: the last hidden states of a text, their mean or that of its first token, [CLS]."""
        return self.embed_tokens([self.tokenizer.encode(text) for text in texts], pooling)

    def embed_tokens(self, texts: Sequence[list[int]], pooling: Pooling) -> np.ndarray:
        """Like `embed`, for texts as tokens."""
        self._check("embed")
        encoded = [(text,) for text in texts]
        return np.stack(self._run(encoded, lambda batch, *_: self._embed(self._params, batch, pooling=pooling)))

    def lengths(self, texts: Sequence[list[int]]) -> list[int]:
        """Numbers of tokens that the model reads of texts as tokens. Raises ValueError for one that it cannot read."""
        vocab_size = self.model.config.vocab_size
        for number, text in enumerate(texts, 1):
            if text and not 0 <= min(text) <= max(text) < vocab_size:
                raise ValueError(
                    f"text {number} has token ids {min(text)} to {max(text)}; they must be below "
                    f"model.vocab_size={vocab_size}; use the tokenizer of the model"
                )
        return [self._length(number, (text,)) for number, text in enumerate(texts)]

    def classify(self, texts: Sequence[tuple[str, ...]]) -> list[Classified]:
        """The class of each text, or pair of texts."""
        self._check_head("sequence_classification")
        encoded = [tuple(self.tokenizer.encode(part) for part in text) for text in texts]
        return [self._classified(probabilities) for probabilities in self._probabilities(encoded)]

    def classify_words(self, texts: Sequence[Sequence[str]]) -> list[list[Classified]]:
        """The class of each word of each text."""
        self._check_head("token_classification")
        words = [encode_words(text, self.tokenizer) for text in texts]
        encoded = [(sum(text, []),) for text in words]
        return [
            [self._classified(of_tokens[1 + place]) for place in np.cumsum([0, *map(len, text[:-1])])]
            for text, of_tokens in zip(words, self._probabilities(encoded), strict=True)
        ]

    # ------------------------------------------------------------------ parts

    @property
    def _pad_id(self) -> int:
        return self.special.pad_id

    def _check(self, task: str) -> None:
        config = self.model.config
        if task not in config.encoder_tasks:
            known = " and ".join(f"infer.py {name}" for name in config.encoder_tasks) or "infer.py generate"
            raise ValueError(f"{self._source}: this model.kind={config.kind} has no head to {task} with; use {known}")

    def _check_head(self, head: str) -> None:
        self._check("classify")
        if self.head != head:
            what = "words" if head == "token_classification" else "texts"
            raise ValueError(f"{self._source}: model.head={self.head} does not classify {what}")

    def _encode_masked(self, text: str) -> list[int]:
        """A tokenizer that knows the mask reads it itself, with the space that it may take in."""
        known = next((name for name in SPELLINGS["mask_id"] if self.tokenizer.token_id(name) is not None), None)
        if known is not None:
            return self.tokenizer.encode_template(MASK.sub(known, text))
        first, *others = (self.tokenizer.encode(part) if part else [] for part in MASK.split(text))
        return first + [token for part in others for token in (self.special.mask_id, *part)]

    def _shown(self, token: int) -> str:
        return self.tokenizer.decode([token]) if token < self.tokenizer.vocab_size else ""

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes: of the labels of the run, or of the folder."""
        named = _names_in_run(self._source) or _names_in_folder(self._source)
        return named or tuple(map(str, range(getattr(self.model.config, "num_classes", 0))))

    @property
    def head(self) -> str:
        """What the model classifies, if it does: sequence_classification or token_classification."""
        return getattr(self.model.config, "head", "")

    def _classified(self, probabilities: np.ndarray) -> Classified:
        named = dict(zip(self.classes, probabilities.tolist(), strict=True))
        return Classified(max(named, key=named.__getitem__), named)

    def _probabilities(self, encoded: Sequence[tuple[list[int], ...]]) -> list[np.ndarray]:
        """[classes] of each text, or [T, classes] in the order of its tokens."""
        program = jax.jit(functools.partial(_classify, self.model))
        of_words = self.head == "token_classification"

        def run(batch: dict, rows: list[int], index_of: np.ndarray):
            found = program(self._params, batch)
            return found[:, index_of] if of_words else found

        return self._run(encoded, run)

    def _run(self, encoded: Sequence[tuple[list[int], ...]], run: Callable[..., Any]) -> list[Any]:
        """The rows of run(batch, numbers of the texts in it, index of each token) for each text, in their order."""
        results: dict[int, Any] = {}
        lengths = [self._length(number, texts) for number, texts in enumerate(encoded)]
        with jax.set_mesh(self.mesh):
            for chosen, shape in text_batches(lengths, self.mesh, self.model.config.max_length):
                batch, index_of = self._batch([encoded[number] for number in chosen], shape)
                found = jax.device_get(run(batch, chosen, index_of))
                for row, number in enumerate(chosen):
                    results[number] = jax.tree.map(lambda array, row=row: array[row], found)
        return [results[number] for number in range(len(encoded))]

    def _framed(self, texts: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """int32 (tokens, their types) that the model reads."""
        return joined(texts, self.special, 1 + sum(len(text) + 1 for text in texts))

    def _length(self, number: int, texts: Sequence[list[int]]) -> int:
        length = len(self._framed(texts)[0])
        if not length:
            raise ValueError(f"text {number + 1} has no tokens; leave it out")
        longest = self.model.config.max_length
        if longest is not None and length > longest:
            raise ValueError(f"text {number + 1} has {length} tokens; the model reads {longest}: shorten or split it")
        return length

    def _batch(self, texts: list[tuple[list[int], ...]], shape: tuple[int, int]) -> tuple[dict, np.ndarray]:
        """-> (arrays [B, T], index in T of each token of a row)."""
        tokens_BT = np.full(shape, self._pad_id, np.int32)
        types_BT = np.zeros_like(tokens_BT)
        segments_BT = np.zeros_like(tokens_BT)
        for row, text in enumerate(texts):
            ids, types = self._framed(text)
            tokens_BT[row, : len(ids)] = ids
            types_BT[row, : len(ids)] = types
            segments_BT[row, : len(ids)] = 1
        arrays = {"tokens": tokens_BT, "segment_ids": segments_BT, "token_types": types_BT}
        return laid_out(arrays, self.model, self.mesh)


class DecoderEncoder(TextEncoder):
    """A decoder that embeds, with the tokens that precede every text of its tokenizer. Raises ValueError for a model
    that is none."""

    _pad_id = 0

    def __init__(self, opened: OpenedModel):
        opened.model.config.check_generates()
        super().__init__(opened)
        self._start_ids = opened.start_ids

    def _check(self, task: str) -> None:
        if task != "embed":
            super()._check(task)

    def _framed(self, texts: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        ids = np.asarray([*self._start_ids, *sum(texts, [])], np.int32)
        return ids, np.zeros_like(ids)


def _hidden(model, params: dict, batch: dict):
    batch = {name: constrain(array, "batch", "time") for name, array in batch.items()}
    module = model.module(params)
    return module, module.hidden(batch)[0], batch


def _fill(model, params: dict, batch: dict, where_BM: jax.Array, *, top_k: int):
    """-> (tokens int32, probabilities float32) [B, M, top_k]."""
    module, h_BTD, _ = _hidden(model, params, batch)
    h_BMD = jnp.take_along_axis(constrain(h_BTD, "batch", None, None), where_BM[..., None], axis=1)
    probabilities, tokens = jax.lax.top_k(jax.nn.softmax(module.token_logits(h_BMD)), top_k)
    return replicated((tokens, probabilities))


def _embed(model, params: dict, batch: dict, *, pooling: Pooling):
    """float32 [B, D]."""
    _, h_BTD, batch = _hidden(model, params, batch)
    counts_BT = batch["segment_ids"] == 1 if pooling == "mean" else batch["positions"] == 0
    weights_BT = counts_BT.astype(jnp.float32)
    total_BD = jnp.sum(h_BTD.astype(jnp.float32) * weights_BT[..., None], axis=1)
    return replicated(total_BD / jnp.maximum(jnp.sum(weights_BT, axis=1, keepdims=True), 1))


def _classify(model, params: dict, batch: dict):
    """float32 [B, C] or [B, T, C]."""
    module, h_BTD, batch = _hidden(model, params, batch)
    return replicated(jax.nn.softmax(module.class_logits(h_BTD, batch)))


def _names_in_run(source) -> tuple[str, ...] | None:
    path = Path(getattr(source, "run_dir", "")) / "data.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    names = found.get("format", {}).get("classes")
    return None if names is None else tuple(names)


def _names_in_folder(source) -> tuple[str, ...] | None:
    names = getattr(source, "options", {}).get("id2label")
    return None if names is None else tuple(names[key] for key in sorted(names, key=int))
