"""Converts options in both directions with the table of a family, and finds the family that has those of a model."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megajax.fields.ranges import check_fields
from megajax.models.interface import ModelConfig
from megajax.weights.hugging_face.form import Family, Foldable
from megajax.weights.hugging_face.known_keys import check_keys


def read_options(family: Family, theirs: Mapping[str, Any]) -> Foldable:
    """The model that a config.json describes.

    Raises ValueError with the key for what is not supported, and for a key that may change what the model computes.
    """
    check_keys(family.options, family.model_type, family.architecture, theirs)
    fields = dict(family.always)
    for option in family.options:
        fields |= option.read(theirs)
    config = family.form.config(fields)
    check_fields(config, "model.")
    return family.form.with_sizes(config)


def write_options(family: Family, config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that determine what the model computes.

    Raises ValueError, naming the fields of the config that the family does not support.
    """
    theirs, lacking = _written(family, config)
    if lacking:
        raise ValueError(f"{family.architecture} does not have {', '.join(lacking)}")
    return theirs


def nearest_family(families: Sequence[Family], config: ModelConfig, architecture: str | None = None) -> Family:
    """The one of these families to write a model as: the named one, or the first that has all of its options.

    Raises ValueError, naming the missing options, for the closest family if none was named.
    """
    ours = [family for family in families if config.kind == family.form.default.kind]
    if not ours:
        raise ValueError(f"model.kind={config.kind} has no Hugging Face folder")
    known = [family for family in ours if architecture in (None, family.architecture)]
    if not known:
        names = ", ".join(family.architecture for family in ours)
        raise ValueError(f"architecture={architecture} is not supported; supported are {names}")
    lacking = {family: _written(family, config)[1] for family in known}
    nearest = min(known, key=lambda family: len(lacking[family]))
    if lacking[nearest]:
        found = "" if architecture else "no supported architecture has all options of this model; "
        raise ValueError(f"{found}{nearest.architecture} does not have {', '.join(lacking[nearest])}")
    return nearest


def _written(family: Family, config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """-> (keys of config.json, config fields that they cannot express)."""
    form = family.form
    config = form.with_sizes(config)
    theirs = {"architectures": [family.architecture], "model_type": family.model_type}
    wanted = form.words(form.canonical(config))
    always = {
        name: value for name, value in family.always.items() if name != "bias"
    }  # it follows from the other biases
    lacking = {name: form.typed(name, config, wanted) for name, value in always.items() if wanted[name] != value}
    for option in family.options:
        try:
            theirs |= option.write(form.words(config))
        except ValueError as error:
            lacking[str(error)] = str(error)
    if not lacking:
        try:
            restored = form.words(form.canonical(read_options(family, theirs)))
        except ValueError as error:
            return theirs, [str(error)]
        lacking = {
            name: form.typed(name, config, wanted)
            for name, value in wanted.items()
            if not _is_same(restored[name], value)
        }
    return theirs, list(lacking.values())


def _is_same(found: Any, wanted: Any) -> bool:
    """Numbers may differ by the rounding of a power: 1 / sqrt(8) is not 8 ** -0.5."""
    if isinstance(found, float) and isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=1e-14)
    return found == wanted
