"""Pictures of runs, meshes and plans: drawings.py draws them, for a notebook and for the command in plot.py."""

from megajax.figures.drawings import attention_mask, curves, loss, memory, mesh, sharding, traffic
from megajax.figures.runs import read_run

__all__ = ["attention_mask", "curves", "loss", "memory", "mesh", "read_run", "sharding", "traffic"]
