"""Use a trained model: python infer.py {generate,chat,serve,bench} --run=DIR; `megajax generate` etc. are the same."""

import sys

from megajax.training.faults.signals import leave_when_interrupted

if __name__ == "__main__":
    leave_when_interrupted()  # while the rest is imported too

from megajax.cli import run_command
from megajax.cli.infer import main

if __name__ == "__main__":
    run_command(main, sys.argv[1:])
