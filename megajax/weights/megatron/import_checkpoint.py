"""Writes a run directory from a checkpoint of Megatron Core."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from megajax.config import Config
from megajax.data.tokenizers.load import load_tokenizer
from megajax.weights.megatron.checkpoint import Checkpoint, open_checkpoint
from megajax.weights.megatron.families import read_arguments
from megajax.weights.megatron.parameters import check_parameters, piecewise_arrays
from megajax.weights.megatron.rows import EMBEDDING
from megajax.weights.run_directory import new_directory, write_imported


def import_checkpoint(
    path: str | Path,
    run_dir: str | Path,
    *,
    iteration: int | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
) -> tuple[Checkpoint, Config]:
    """Writes a run directory with the parameters of an iteration (default: the newest) as its step.

    dtype: of the matrices; default: as they are there. tokenizer: for data.tokenizer; default: the one in the
    checkpoint. Memory holds a few of Megatron's largest arrays of one layer or expert, not the model. Raises ValueError
    if run_dir exists, or for a checkpoint that cannot be imported as a whole; then nothing is left.
    """
    with new_directory(run_dir, "run_dir") as new:
        checkpoint, config = read(path, iteration, tokenizer)
        found = load_tokenizer(config.data.tokenizer)
        arrays = piecewise_arrays(checkpoint.parameters, config.model, jnp.dtype(dtype) if dtype else None)
        step = checkpoint.iteration
        record = {"megatron": str(checkpoint.folder.resolve()), "step": step, "dtype": dtype}
        write_imported(new, config, step, arrays, found, record)
    return checkpoint, config


def read(path: str | Path, iteration: int | None, tokenizer: str | None) -> tuple[Checkpoint, Config]:
    """The checkpoint, and the config of a run with its model. Raises ValueError if they do not fit together."""
    checkpoint = open_checkpoint(path, iteration)
    if EMBEDDING not in checkpoint.parameters:
        raise ValueError(f"{checkpoint.folder}: parameter {EMBEDDING} is missing")
    try:
        shapes = {name: array.shape for name, array in checkpoint.parameters.items()}
        config = read_arguments(checkpoint.arguments, shapes, checkpoint.folder)
        config.model.check(config.mesh, config.training.sequence_length, config.execution)
        check_parameters(checkpoint.parameters, config.model)
    except ValueError as error:
        raise ValueError(f"{checkpoint.folder}: {error}") from None
    if tokenizer is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=tokenizer))
    return checkpoint, config
