"""JSON schemas of the allowed values of config fields, from their annotations, for editors."""

import types
import typing
from typing import Annotated, Any, Literal

from megajax.fields.ranges import Range, is_union

NAMES = {int: "integer", float: "number", bool: "boolean", str: "string", types.NoneType: "null"}


def schema_of(hint: Any) -> dict[str, Any]:
    """The schema of an annotation, in draft 7, which editors know. A list may be one text with commas."""
    kind, *metadata = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return {"enum": list(parts)}
    if is_union(kind):
        return {"anyOf": [schema_of(part) for part in parts]}
    if typing.get_origin(kind) is tuple:
        items = schema_of(parts[0])
        counts = {} if parts[1:] == (...,) else {"minItems": len(parts), "maxItems": len(parts)}
        if counts and len(set(parts)) > 1:
            items = [schema_of(part) for part in parts]
        return {"anyOf": [{"type": "array", "items": items, **counts}, {"type": "string"}]}
    return {"type": NAMES[kind]} | {
        name: bound
        for bounds in metadata
        if isinstance(bounds, Range)
        for name, bound in (
            ("minimum", bounds.at_least), ("exclusiveMinimum", bounds.above),
            ("maximum", bounds.at_most), ("exclusiveMaximum", bounds.below),
        )
        if bound is not None
    }  # fmt: skip
