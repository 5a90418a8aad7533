"""Training runs of the tests of this folder."""

import json
from pathlib import Path

import jax

from megajax import run
from megajax.config import Config


def run_of(config: Config, monkeypatch) -> list[dict]:
    """-> lines of metrics.jsonl of the run on the devices that its mesh needs."""
    devices = jax.devices()[: config.mesh.num_devices]
    with monkeypatch.context() as patched:
        patched.setattr(jax, "devices", lambda *_: devices)
        patched.setattr(jax, "device_count", lambda *_: len(devices))
        assert run.train(config) in ("finished", "interrupted")
    text = (Path(config.run_dir) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
