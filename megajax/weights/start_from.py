"""checkpoint.start_from: initialises a new run with the weights of another run or a Hugging Face folder.

Only names, shapes and layers of the parameters must agree: other settings of the model may differ (a longer context,
another dropout), and are logged. A dense model can start a run with experts (upcycling.py), and one that reads images
or sound can take its encoders from other folders (checkpoint.start_towers_from).
"""

import dataclasses
import functools
import logging
from collections.abc import Collection
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from megajax import hub
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.steps import find_step, saved_steps
from megajax.config import Config, differences, holds_run
from megajax.layers.lora import to_eight_bits
from megajax.mesh.sharding import with_shardings
from megajax.models.model import Model
from megajax.models.multimodal import MultimodalConfig
from megajax.parameters import is_in_8_bits, matches, merge, name_of, named, nested, select
from megajax.training.program import Program
from megajax.weights.hugging_face.adapter import is_adapter
from megajax.weights.hugging_face.folder import is_folder
from megajax.weights.hugging_face.tower import TowerFolder, TowerWeights
from megajax.weights.sources import WeightSource, open_source
from megajax.weights.upcycling import model_for, upcycled

logger = logging.getLogger("megajax")

SCALE = "_scale"  # ends the name of what EightBitBase (layers/lora.py) puts beside a matrix


def pinned(config: Config) -> Config:
    """The config with start_from resolved to a step, which does not change during the life of the run. All processes
    call this. The value recorded in the run directory is used if start_from is not given or the run has a checkpoint.

    Raises ValueError if there is no such step.
    """
    requested = config.checkpoint
    recorded = Config.load(config.run_dir).checkpoint if holds_run(config.run_dir) else CheckpointConfig()
    if saved_steps(config.run_dir):
        if requested.start_from and requested.source() != recorded.source():
            logger.info("checkpoint.start_from=%s has no effect: the run has already begun", requested.start_from)
        return _replaced(config, recorded.start_from, recorded)
    if not requested.start_from:
        return _replaced(config, recorded.start_from, recorded) if recorded.start_from else config
    source, step = requested.source()
    if step is None and recorded.start_from and recorded.source()[0] == source:
        return _replaced(config, recorded.start_from, requested)
    if step is None and (is_folder(source) or is_adapter(source)):
        return _replaced(config, str(source), requested)
    if step is None:
        step = _newest_step(requested.start_from, source)
    return _replaced(config, str(source / "checkpoints" / str(step)), requested)


def _replaced(config: Config, start_from: str, others: CheckpointConfig) -> Config:
    towers = tuple(str(Path(hub.local(path)).resolve()) for path in others.start_towers_from)
    checkpoint = dataclasses.replace(
        config.checkpoint, start_from=start_from, start_fresh=others.start_fresh, start_towers_from=towers
    )
    return dataclasses.replace(config, checkpoint=checkpoint)


def _newest_step(requested: str, source: Path) -> int:
    """Only the first process reads the directory, because the other run may be saving."""
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
        raise ValueError(f"checkpoint.start_from={requested}: {problem or 'the first process found no step there'}")
    return step


def check(config: Config) -> None:
    """Raises ValueError if the weights of the other run do not fit this one; start_from must be pinned."""
    requested = config.checkpoint.start_from
    try:
        source = _source(config).config
        theirs = model_for(source, config)
        theirs.check_divides(config.mesh.sizes())
        ours = config.make_model()
    except ValueError as error:
        raise ValueError(f"checkpoint.start_from={requested}: {error}") from None
    towers = _towers(config)
    of_towers = {name for tower in towers for name in tower.names}
    names = _shapes(ours).keys() | _shapes(theirs).keys()
    for pattern in config.checkpoint.start_fresh:
        if not any(matches(name, [pattern]) for name in names):
            raise ValueError(
                f"checkpoint.start_fresh: {pattern!r} matches no parameter of either model; leave it out (parameter "
                f"names look like {min(names)})"
            )
    derived = of_towers | _scales(ours, theirs)
    problems = _problems(ours, theirs, derived, _fresh(config, ours, theirs))
    if source.lora.rank and config.lora.rank and source.lora.scale != config.lora.scale:
        problems.append(f"adapters are multiplied by {source.lora.scale:g} there and {config.lora.scale:g} here")
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(
            f"checkpoint.start_from={requested} has the weights of another model ({'; '.join(problems[:4])}{more}); "
            "use the model config of that run, or name what to initialise or leave out with --checkpoint.start_fresh"
        )


def weights(config: Config, program: Program) -> dict:
    """The weights that the run starts with, sharded for the mesh of the program."""
    mesh = program.mesh
    assert isinstance(mesh, Mesh)  # abstract for a plan alone, which reads no weights
    source = _source(config)
    model = program.model
    logger.info("starting with the weights of %s", source)
    changed = differences(source.config.model, config.model, "model.")
    if changed:
        logger.info("the model config differs from it: %s", "; ".join(changed))
    theirs = model_for(source.config, config)
    ours = _shapes(model)
    patterns = _fresh(config, model, theirs)
    fresh = sorted(name for name in ours if matches(name, patterns))
    if fresh:
        logger.info("newly initialised: %s", ", ".join(fresh))
    if left_out := sorted(name for name in _shapes(theirs) if name not in ours):
        logger.info("not used: %s", ", ".join(left_out))
    found = _restored(source, theirs, model, mesh)
    towers = _towers(config)
    of_towers = {name for tower in towers for name in tower.names}
    loaded = select(found, lambda name: name in ours and name not in fresh and name not in of_towers)
    for tower in towers:
        target = with_shardings(model.abstract_weights, model.shardings(mesh))
        target = select(target, lambda name, tower=tower: name in tower.names and name not in fresh)
        loaded = merge(loaded, tower.restore_params(target, model.layer_rows))
    return merge(loaded, model.init(config.training.seed, mesh, only=fresh)) if fresh else loaded


def _fresh(config: Config, ours: Model, theirs: Model) -> tuple[str, ...]:
    """Patterns of the parameters that are not loaded: of start_fresh, and new adapters."""
    known = _shapes(theirs)
    records = named(ours.records)
    adapters = [name for name, record in records.items() if record.role == "adapter" and name not in known]
    return (*config.checkpoint.start_fresh, *adapters)


def _restored(source: WeightSource, theirs: Model, model: Model, mesh: Mesh) -> dict:
    """The weights of another model in the formats of this one. Matrices that become 8 bits are rounded one after the
    other, and read so from a folder: then the devices never hold all of them as they were."""
    target = with_shardings(_as_stored(theirs.abstract_weights, model), theirs.shardings(mesh))
    dtypes = {name: leaf.dtype for name, leaf in named(model.abstract_weights).items()}
    records = named(model.records)
    shardings = named(model.shardings(mesh))
    rounded = sorted(scale.removesuffix(SCALE) for scale in _scales(model, theirs))  # alike in all processes
    parts = [[name] for name in rounded] if source.reads_parts else []
    found: dict[str, jax.Array] = {}
    for part in (*parts, [name for name in named(target) if [name] not in parts]):
        read = select(target, lambda name, part=part: name in part)
        found |= named(source.restore_params(read, theirs.layer_rows))
        for name in (name for name in rounded if name in part):
            first = records[name].num_stacked
            axes = range(first, first + records[name].num_inputs)
            convert = functools.partial(to_eight_bits, axes=axes, dtype=dtypes[name])
            placed = jax.jit(convert, out_shardings=(shardings[name], shardings[name + SCALE]))
            found[name], found[name + SCALE] = jax.block_until_ready(placed(found[name]))
    return nested((tuple(name.split(".")), array) for name, array in found.items())


def _scales(ours: Model, theirs: Model) -> set[str]:
    """Names of the scales of matrices that are in 8 bits in our model only."""
    scales = {name + SCALE for name, leaf in named(ours.abstract_weights).items() if is_in_8_bits(leaf)}
    return scales - _shapes(theirs).keys()


def _as_stored(abstract: dict, model: Model) -> dict:
    """The weights of another model in the dtypes of this one; those that are to be rounded in the compute dtype."""
    compute = model.precision.compute_dtype
    known = named(abstract)
    dtypes = {
        name: compute if is_in_8_bits(leaf) and name + SCALE not in known else leaf.dtype
        for name, leaf in named(model.abstract_weights).items()
    }

    def cast(path, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return leaf.update(dtype=dtypes.get(name_of(path), leaf.dtype))

    return jax.tree_util.tree_map_with_path(cast, abstract)


def _source(config: Config) -> WeightSource:
    return upcycled(open_source(*config.checkpoint.source()), config)


def _towers(config: Config) -> list[TowerWeights]:
    found: list[TowerWeights] = []
    for path in config.checkpoint.start_towers_from:
        if not isinstance(config.model, MultimodalConfig):
            raise ValueError(
                f"checkpoint.start_towers_from={path}: model.kind={config.model.kind} reads no images and no sound; "
                "use --model.kind=multimodal"
            )
        try:
            folder = TowerFolder(path)
            found.append(folder.weights(config.model))
        except ValueError as error:
            raise ValueError(f"checkpoint.start_towers_from={path}: {error}") from None
        if changed := folder.differences(config.model):
            logger.info("the model config differs from that of %s: %s", path, "; ".join(changed))
    if len({tower.section for tower in found}) < len(found):
        raise ValueError(
            f"checkpoint.start_towers_from={','.join(config.checkpoint.start_towers_from)} has two encoders of "
            "one kind; name one of them"
        )
    return found


def _problems(ours: Model, theirs: Model, of_towers: Collection[str], fresh: tuple[str, ...]) -> list[str]:
    """How the parameters of the two models differ, apart from those that match `fresh`. of_towers: those that come from
    elsewhere, and fit."""
    needed = {name: shape for name, shape in _shapes(ours).items() if not matches(name, (*fresh, *of_towers))}
    available = {name: shape for name, shape in _shapes(theirs).items() if not matches(name, (*fresh, *of_towers))}
    problems = [f"{name} is missing there" for name in needed if name not in available]
    problems += [f"{name} is missing here" for name in available if name not in needed]
    problems += [
        f"{name} is {list(available[name])} there and {list(needed[name])} here"
        for name in needed
        if name in available and available[name] != needed[name]
    ]
    for stack, layers in ours.layer_rows.items():
        is_loaded = any(name.startswith(f"{stack}.") for name in needed)
        other = theirs.layer_rows.get(stack)
        if is_loaded and other is not None and layers.shape == other.shape and not np.array_equal(layers, other):
            problems.append(f"{stack} has layers {other.ravel().tolist()} there and {layers.ravel().tolist()} here")
    return problems


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shape of each weight, by name."""
    return {name: leaf.shape for name, leaf in named(model.abstract_weights).items()}
