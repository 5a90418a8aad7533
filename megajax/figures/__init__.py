"""Pictures: of runs and plans (plot.py), and in a notebook (notebook.py), whose functions are those of this package."""

from megajax.figures.notebook import attention_mask, loss, memory, mesh, sharding, traffic

__all__ = ["attention_mask", "loss", "memory", "mesh", "sharding", "traffic"]
