"""What neighbours gain, by how much of the text they give away: megajax retrieve report (overlap.py says why).

The held-out samples of a run are read with their neighbours, with those of the next sample, and without any, and by a
second run, of a plain model, if one is given.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from megajax.data.datasets import Amounts
from megajax.inference.load import OpenedModel, open_model
from megajax.retrieval.inputs import NO_TOKEN
from megajax.retrieval.overlap import GRAM, overlaps

EDGES = (0.0, 0.05, 0.25, 1.0)
"""Buckets: no 13-gram of a chunk is in its neighbours; up to 5 %, up to 25 %, more."""
BATCH = 8


def report(run: str, baseline: str | None, num_samples: int) -> list[dict[str, float]]:
    """A row for each bucket and one for all chunks: `overlap` up to which (1: all), `chunks`, and the loss in nats per
    token `own`, `random`, `without` and, of the second run, `baseline`.

    A chunk is scored from its first to its last token, which are predicted with the neighbours of the chunks before it;
    the first chunk of a sample has none, and is left out. Raises ValueError for a run without neighbours, and for a
    second one with another tokenizer.
    """
    opened = open_model(run)
    config = opened.source.config
    form = config.model.neighbours
    if form is None:
        raise ValueError(f"run={run}: model.kind={config.model.kind} reads no neighbours; name a run that does")
    scorers = {"own": _scorer(opened)}
    others = None
    if baseline is not None:
        other = open_model(baseline)
        if other.tokenizer.vocab_size != opened.tokenizer.vocab_size:
            raise ValueError(f"baseline={baseline}: its tokenizer has another vocabulary than that of run={run}")
        others = _scorer(other)
    training = config.training
    amounts = Amounts(training.sequence_length, training.seed, training.global_batch_size, num_samples)
    dataset = config.task.datasets(config.data, config.model, amounts).eval
    if dataset is None:
        raise ValueError(f"run={run}: its data has no held-out part; set --data.split when it is trained")
    found: dict[str, list[np.ndarray]] = {"overlap": []}
    for begin in range(0, num_samples - BATCH + 1, BATCH):
        samples = [dataset[i] for i in range(begin, begin + BATCH)]
        batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        neighbours = batch["neighbour_tokens"]
        changed = {
            "own": neighbours,
            "random": np.roll(neighbours, 1, axis=0),
            "without": np.full_like(neighbours, NO_TOKEN),
        }
        losses = {name: scorers["own"](batch | {"neighbour_tokens": array}) for name, array in changed.items()}
        if others is not None:
            losses["baseline"] = others({name: batch[name] for name in batch if name != "neighbour_tokens"})
        for name, loss_BT in losses.items():
            found.setdefault(name, []).append(by_chunk(loss_BT, form.chunk_length))
        found["overlap"].append(chunk_overlaps(batch["tokens"], neighbours, form.chunk_length))
    arrays = {name: np.concatenate([part.ravel() for part in parts]) for name, parts in found.items()}
    return rows_of(arrays)


def _scorer(opened: OpenedModel):
    """-> (batch -> nats of each label [B, T])."""
    with jax.set_mesh(opened.mesh):
        weights = opened.restore()
    model = opened.model
    names = model.config.inputs(1, packed=True)

    @jax.jit
    def score(weights, batch):
        return -model.scores(weights, batch).log_probs

    def run(batch: Mapping[str, np.ndarray]) -> np.ndarray:
        read = {name: jnp.asarray(batch[name]) for name in (*names, "labels")}
        with jax.set_mesh(opened.mesh):
            return np.asarray(score(weights, read))

    return run


def by_chunk(loss_BT: np.ndarray, length: int) -> np.ndarray:
    """[B, U - 1]: the mean of the tokens of each chunk but the first; token t is the label of place t - 1."""
    ahead = loss_BT[:, length - 1 : -1]
    whole = ahead.shape[1] // length * length
    return ahead[:, :whole].reshape(len(ahead), -1, length).mean(-1)


def chunk_overlaps(tokens_BT: np.ndarray, neighbours_BUKR: np.ndarray, length: int) -> np.ndarray:
    """[B, U - 1], of each chunk but the first: the largest share of the 13-grams that end in it which a neighbour of
    the chunk before it has."""
    batch, chunks = neighbours_BUKR.shape[:2]
    starts = np.arange(1, chunks) * length - (GRAM - 1)
    texts = np.stack([tokens_BT[:, start : start + length + GRAM - 1] for start in starts], 1)
    shares = overlaps(
        texts.reshape(batch * (chunks - 1), -1), neighbours_BUKR[:, :-1].reshape(-1, *neighbours_BUKR.shape[2:])
    )
    return np.asarray(shares).max(-1).reshape(batch, chunks - 1)


def rows_of(arrays: dict[str, np.ndarray]) -> list[dict[str, float]]:
    overlap = arrays["overlap"]
    bounds = [(-1.0, EDGES[0]), *zip(EDGES[:-1], EDGES[1:], strict=True), (-1.0, 1.0)]
    rows = []
    for low, high in bounds:
        chosen = (overlap > low) & (overlap <= high)
        losses = (
            {name: float(loss[chosen].mean()) for name, loss in arrays.items() if name != "overlap"}
            if chosen.any()
            else {}
        )
        rows.append({"overlap": high, "chunks": int(chosen.sum())} | losses)
    return rows
