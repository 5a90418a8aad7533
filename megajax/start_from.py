"""checkpoint.start_from: a new run begins with the weights of another, except those that are to be drawn afresh.

What decides is the parameters, their names, shapes and layers: models that compute something else with the same ones (a
longer context, another dropout) may follow each other, and the log says what differs.
"""

import dataclasses
import logging
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.steps import find_step, saved_steps
from megajax.config import Config, differences, holds_run
from megajax.models.model import Model
from megajax.parameters import matches, merge, name_of, select
from megajax.sharding import with_shardings
from megajax.training.program import Program

logger = logging.getLogger("megajax")


def pinned(config: Config) -> Config:
    """The config with the step that start_from means, which stays the same as long as the run does; all processes call
    it. What the run directory says counts where start_from is not given, or the run has a checkpoint.

    Raises ValueError if there is no such step.
    """
    given = config.checkpoint
    recorded = Config.load(config.run_dir).checkpoint if holds_run(config.run_dir) else CheckpointConfig()
    if saved_steps(config.run_dir):
        if given.start_from and given.source() != recorded.source():
            logger.info("checkpoint.start_from=%s has no effect: the run has already begun", given.start_from)
        return _replaced(config, recorded.start_from, recorded.start_fresh)
    if not given.start_from:
        return _replaced(config, recorded.start_from, given.start_fresh) if recorded.start_from else config
    source, step = given.source()
    if step is None and recorded.start_from and recorded.source()[0] == source:
        return _replaced(config, recorded.start_from, given.start_fresh)
    if step is None:
        step = _newest_step(given.start_from, source)
    return _replaced(config, str(source / "checkpoints" / str(step)), given.start_fresh)


def _replaced(config: Config, start_from: str, start_fresh: tuple[str, ...]) -> Config:
    checkpoint = dataclasses.replace(config.checkpoint, start_from=start_from, start_fresh=start_fresh)
    return dataclasses.replace(config, checkpoint=checkpoint)


def _newest_step(given: str, source: Path) -> int:
    """The first process looks, because the other run may be saving."""
    step = -1
    problem = ""
    if jax.process_index() == 0:
        try:
            step = find_step(source)
        except ValueError as error:
            problem = str(error)
    if jax.process_count() > 1:
        step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
    if step < 0:
        raise ValueError(f"checkpoint.start_from={given}: {problem or 'the first process found no step there'}")
    return step


def check(config: Config) -> None:
    """Raises ValueError if the weights of the other run are not those that this one needs; start_from is pinned."""
    given = config.checkpoint.start_from
    try:
        source, step = config.checkpoint.source()
        find_step(source, step)
        theirs = _its_model(config)
        theirs.check_divides(config.mesh.sizes())
        ours = config.make_model()
    except ValueError as error:
        raise ValueError(f"checkpoint.start_from={given}: {error}") from None
    names = _shapes(ours).keys() | _shapes(theirs).keys()
    for pattern in config.checkpoint.start_fresh:
        if not any(matches(name, [pattern]) for name in names):
            raise ValueError(
                f"checkpoint.start_fresh: {pattern!r} matches no parameter; parameter names look like {min(names)}"
            )
    if problems := _problems(ours, theirs, config.checkpoint.start_fresh):
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(
            f"checkpoint.start_from={given} has the weights of another model ({'; '.join(problems[:4])}{more}); "
            "use the model config of that run, or name what to initialise or leave out with --checkpoint.start_fresh"
        )


def weights(config: Config, program: Program) -> dict:
    """The weights that the run begins with, laid out on the mesh of the program."""
    source, step = config.checkpoint.source()
    step = find_step(source, step)
    patterns = config.checkpoint.start_fresh
    model = program.model
    logger.info("starting with the weights of %s, step %d", source, step)
    changed = differences(Config.load(source, step).model, config.model, "model.")
    if changed:
        logger.info("the model config differs from that run: %s", "; ".join(changed))
    theirs = _its_model(config)
    ours = _shapes(model)
    drawn = sorted(name for name in ours if matches(name, patterns))
    if drawn:
        logger.info("newly initialised: %s", ", ".join(drawn))
    if left_out := sorted(name for name in _shapes(theirs) if name not in ours):
        logger.info("not used: %s", ", ".join(left_out))
    target = with_shardings(theirs.abstract_weights, theirs.shardings(program.mesh))
    with Checkpointer(source, None) as checkpointer:
        found = checkpointer.restore_params(step, target, theirs.layer_rows)
    taken = select(found, lambda name: name in ours and name not in drawn)
    return merge(taken, model.init(config.training.seed, program.mesh, only=drawn)) if drawn else taken


def _its_model(config: Config) -> Model:
    """The model of the other run, laid out in the pipeline of this one."""
    before = Config.load(*config.checkpoint.source())
    training = dataclasses.replace(before.training, frozen=(), trained=())
    return dataclasses.replace(before, mesh=config.mesh, precision=config.precision, training=training).make_model()


def _problems(ours: Model, theirs: Model, fresh: tuple[str, ...]) -> list[str]:
    """What keeps the parameters that are not fresh from being the same."""
    wanted = {name: shape for name, shape in _shapes(ours).items() if not matches(name, fresh)}
    there = {name: shape for name, shape in _shapes(theirs).items() if not matches(name, fresh)}
    problems = [f"{name} is missing there" for name in wanted if name not in there]
    problems += [f"{name} is missing here" for name in there if name not in wanted]
    problems += [
        f"{name} is {list(there[name])} there and {list(wanted[name])} here"
        for name in wanted
        if name in there and there[name] != wanted[name]
    ]
    for place, rows in ours.layer_rows.items():
        is_taken = any(name.startswith(f"{place}.") for name in wanted)
        other = theirs.layer_rows.get(place)
        if is_taken and other is not None and rows.shape == other.shape and not np.array_equal(rows, other):
            problems.append(f"{place} has layers {other.ravel().tolist()} there and {rows.ravel().tolist()} here")
    return problems


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Of each weight, by its name."""
    return {name_of(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(model.abstract_weights)}
