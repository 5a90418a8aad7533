"""Train a model: python train.py --config=NAME [--section.field=value ...]; `megajax train` is the same."""

import sys

from megajax.mesh.allocators import keep_freed_memory_without_gpu
from megajax.training.faults.signals import leave_when_asked

if __name__ == "__main__":
    keep_freed_memory_without_gpu()
    leave_when_asked()  # while the rest is imported too, which takes seconds

from megajax.cli import run_command
from megajax.cli.train import main

if __name__ == "__main__":
    run_command(main, sys.argv[1:], trains=True)
