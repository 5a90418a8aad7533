"""Parameter groups: the update rule, the learning rate and the weight decay of each parameter, by its name.

A group is a text "PATTERN field=value field=value". The pattern is a shell pattern (* and ?) for whole names, like
layers.dense.attention.query; spaces separate the fields, because commas separate groups on the command line:

    --optimizer.groups='*router* learning_rate_scale=0.1 weight_decay=0,embedding optimizer=adamw'

The first group that matches a parameter decides. Fields that it does not set, and parameters that no group matches,
follow the section `optimizer` and the parameter's own record: biases and norm scales do not decay.
"""

import dataclasses
import typing
from typing import Any, Literal

import jax

from megajax.fields.ranges import Coefficient, Multiplier, check_fields
from megajax.parameters import Parameter, matches, name_of

PyTree = Any

UpdateRule = Literal["adamw", "sgd", "lion", "muon", "normuon"]
OF_MATRICES = ("muon", "normuon")
"""The rules that are only for the matrices of layers."""

EXAMPLE = "for example '*router* learning_rate_scale=0.1 weight_decay=0'"


@dataclasses.dataclass(frozen=True)
class Group:
    """The fields of one entry of optimizer.groups."""

    pattern: str
    learning_rate_scale: Multiplier = 1.0
    """Factor on the scheduled learning rate; use training.frozen for parameters that are not trained."""
    weight_decay: Coefficient | None = None
    """Replaces optimizer.weight_decay, and applies to biases and norm scales too; None: the default."""
    optimizer: UpdateRule | None = None
    """Replaces optimizer.name; None: the default."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one parameter is updated: p = p - learning_rate_scale * lr * (direction + weight_decay * p)."""

    optimizer: UpdateRule
    """Computes the direction from the gradient; muon and normuon only for matrices."""
    weight_decay: float
    learning_rate_scale: float
    record: Parameter


def parse_group(text: str) -> Group:
    """Raises ValueError if the text is not a group."""
    pattern, *settings = text.split() or [""]
    if "=" in pattern or not settings:
        raise ValueError(
            f"optimizer.groups={text!r} must be a pattern of parameter names and at least one field=value; {EXAMPLE}"
        )
    values: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name in values:
            raise ValueError(f"optimizer.groups={text!r} sets {name} twice; leave one of them")
        values[name] = _parse_value(text, name, value)
    group = Group(pattern, **values)
    try:
        check_fields(group)
    except ValueError as error:
        raise ValueError(f"optimizer.groups={text!r}: {error}") from None
    return group


def _parse_value(text: str, name: str, value: str) -> float | str:
    names = [field.name for field in dataclasses.fields(Group)][1:]
    if name not in names:
        raise ValueError(f"optimizer.groups={text!r}: {name!r} is not a field; use {', '.join(names)}; {EXAMPLE}")
    if name == "optimizer":
        return value
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"optimizer.groups={text!r}: {name}={value} must be a number; {EXAMPLE}") from None


def rules_of(records: PyTree, groups: tuple[str, ...], optimizer: UpdateRule, weight_decay: float) -> PyTree:
    """The Rule of each parameter, in a tree like that of its records.

    Args:
        records: nested dict of megajax.parameters.Parameter.
        groups: optimizer.groups.
        optimizer, weight_decay: optimizer.name and optimizer.weight_decay, the values without a group.

    Raises ValueError for an unknown update rule, for a group that applies to no parameter, and for a Muon group without
    a matrix.
    """
    if optimizer not in typing.get_args(UpdateRule):
        raise ValueError(f"optimizer.name={optimizer} is unknown; use {', '.join(typing.get_args(UpdateRule))}")
    parsed = [parse_group(text) for text in groups]
    default = Group("*")
    group_of = jax.tree_util.tree_map_with_path(
        lambda path, _: next((group for group in parsed if matches(name_of(path), [group.pattern])), default), records
    )
    for text, group in zip(groups, parsed, strict=True):
        _check_use(text, group, group_of, records)

    def rule(record: Parameter, group: Group) -> Rule:
        chosen = group.optimizer or optimizer
        decay = weight_decay if record.decays else 0.0
        return Rule(
            optimizer="adamw" if chosen in OF_MATRICES and record.role != "matrix" else chosen,
            weight_decay=decay if group.weight_decay is None else group.weight_decay,
            learning_rate_scale=group.learning_rate_scale,
            record=record,
        )

    return jax.tree.map(rule, records, group_of)


def _check_use(text: str, group: Group, group_of: PyTree, records: PyTree) -> None:
    """Raises ValueError if the group decides for nothing."""
    names = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(records)]
    if not any(matches(name, [group.pattern]) for name in names):
        raise ValueError(
            f"optimizer.groups={text!r} matches no trained parameter; they are called like {names[0]}, and * stands "
            "for any part of a name"
        )
    applies = [chosen is group for chosen in jax.tree.leaves(group_of)]
    if not any(applies):
        raise ValueError(
            f"optimizer.groups={text!r} applies to no parameter: all that it matches are matched by earlier groups, "
            "and the first match wins; put it before them"
        )
    roles = {record.role for record, used in zip(jax.tree.leaves(records), applies, strict=True) if used}
    if group.optimizer in OF_MATRICES and "matrix" not in roles:
        raise ValueError(
            f"optimizer.groups={text!r} matches no matrix of a layer ({', '.join(sorted(roles))}), and Muon updates "
            "only those; use optimizer=adamw"
        )


def assigned_optimizers(groups: tuple[str, ...]) -> list[tuple[str, str | None]]:
    """The update rules that the groups assign: the part of the groups that the optimizer state depends on."""
    parsed = [parse_group(text) for text in groups]
    assigned: list[tuple[str, str | None]] = [(group.pattern, group.optimizer) for group in parsed]
    return assigned if any(optimizer for _, optimizer in assigned) else []
