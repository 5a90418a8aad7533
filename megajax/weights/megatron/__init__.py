"""Megatron Core's checkpoints and parameters; python -m megajax.convert.megatron --help is the command."""

from megajax.weights.megatron.parameters import from_megajax, to_megajax

__all__ = ["from_megajax", "to_megajax"]
