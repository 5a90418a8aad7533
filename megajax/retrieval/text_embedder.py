"""Vectors of chunks from a bidirectional model: a run, or a Hugging Face folder."""

import os

import numpy as np

from megajax.data.config import DataConfig
from megajax.data.tokenizers.load import load_tokenizer
from megajax.inference.load import open_model
from megajax.inference.text_encoder import TextEncoder
from megajax.retrieval.hash_embedder import normalised
from megajax.retrieval.inputs import NO_TOKEN


class TextEmbedder:
    """The mean of the hidden states of the text of a chunk, which the model's own tokenizer reads.

    Raises ValueError for a model that embeds no texts, or if `prefix` does not say which tokenizer wrote it.
    """

    def __init__(self, path: str, prefix: str):
        spec = DataConfig(source="indexed", paths=(prefix,)).with_tokenizer(vocab_size=1).tokenizer
        if spec.startswith("null:"):
            raise ValueError(
                f"--embed={path} reads text, and {prefix}.meta.json does not say how to decode the tokens; preprocess "
                "the text with a tokenizer, or use the embedder without a model (no --embed)"
            )
        self._tokenizer = load_tokenizer(spec)
        opened = open_model(path)
        if "embed" not in opened.model.config.encoder_tasks:
            raise ValueError(f"--embed={path}: model.kind={opened.model.config.kind} embeds no texts; name a BERT")
        self._encoder = TextEncoder(opened)
        self._longest = opened.model.config.max_length
        self.width = self._encoder.embed(["a"], "mean").shape[1]
        step = getattr(opened.source, "step", None)
        self.facts = {"kind": "model", "model": os.path.abspath(path), "step": step, "width": self.width}

    def embed(self, chunks: np.ndarray) -> np.ndarray:
        """int32 [n, chunk_length], NO_TOKEN for padding -> float16 [n, width] of length 1."""
        texts = [self._text(chunk[chunk != NO_TOKEN].tolist()) for chunk in chunks]
        return normalised(self._encoder.embed(texts, "mean"))

    def _text(self, tokens: list[int]) -> str:
        """As much of it as the model reads."""
        text = self._tokenizer.decode(tokens)
        while self._longest and len(self._encoder.tokenizer.encode(text)) + 2 > self._longest:
            text = text[: len(text) // 2]
        return text
