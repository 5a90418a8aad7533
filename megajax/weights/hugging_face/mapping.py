"""The families of Hugging Face folders that are supported, and which of them a folder or a model belongs to."""

from collections.abc import Mapping
from typing import Any

from megajax.models.interface import ModelConfig
from megajax.weights.hugging_face import encoder_decoders, encoders, families, hybrids, mixtures
from megajax.weights.hugging_face.form import Family
from megajax.weights.hugging_face.multimodal import families as multimodal
from megajax.weights.hugging_face.translate import nearest_family

# In order of preference when exporting a model without a named architecture.
FAMILIES = tuple(
    family for kind in (families, mixtures, hybrids, encoders, encoder_decoders, multimodal) for family in kind.FAMILIES
)


def family_of(theirs: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ValueError for an architecture without a table."""
    names = theirs.get("architectures") or []
    if not isinstance(names, list):
        raise ValueError(f"architectures={names} must be a list of names")
    for family in FAMILIES:
        if family.architecture in names or (not names and theirs.get("model_type") == family.model_type):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ValueError(
        f"architectures={names}, model_type={theirs.get('model_type')} is not supported; supported are {known}"
    )


def family_for(config: ModelConfig, architecture: str | None = None) -> Family:
    """The family to write a model as: the named one, or the first that has all of its options.

    Raises ValueError, naming the missing options, for the closest family if none was named.
    """
    return nearest_family(FAMILIES, config, architecture)
