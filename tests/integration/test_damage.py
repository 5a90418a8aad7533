"""Any file of a run directory may be damaged: then the run goes on and is served as before, or the file is named.

One small run trains six steps and is copied for each damage. What reads the files is called as train.py and infer.py
call it; no step is computed after that.
"""

import base64
import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from launch import tiny_config
from megajax import run
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.verify import sealed
from megajax.config import Config
from megajax.data.tokenizers.load import load_tokenizer, save_tokenizer
from megajax.inference.engine import Engine
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.overrides import override
from megajax.training.faults.watchdog import Watchdog
from megajax.training.program import Program
from megajax.training.run_lock import locked
from megajax.weights.export import export
from megajax.weights.sources import tokenizer_of

pytestmark = pytest.mark.fault


@dataclasses.dataclass
class Saved:
    config: Config
    program: Program
    """On one device, so that there is little to lay out."""
    trained: dict[int, tuple]
    """{step: (weights, optimizer state)} on the host."""
    served: dict[int, dict]

    def copy(self, folder: Path) -> "Saved":
        shutil.copytree(self.config.run_dir, folder, symlinks=True)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, run_dir=str(folder)))

    def restore(self) -> tuple[int, tuple]:
        """The part of `resume` that reads the checkpoints."""
        state = self.program.abstract_state
        with Checkpointer(self.config.run_dir, CheckpointConfig()) as checkpointer:
            found = checkpointer.restore_newest(state.weights, state.optimizer, self.program.model.layer_rows)
        step, weights, optimizer, _ = found
        return step, jax.device_get((weights, optimizer))

    def resume(self) -> tuple[int, tuple]:
        """What train.py does before its first step."""
        run.check(self.config)
        program, datasets = run.make_program(self.config), run.load_data(self.config)
        run_dir = Path(self.config.run_dir)
        with (
            locked(run_dir) as lock,
            run.make_trainer(self.config, program, datasets, Watchdog(0), lock) as trainer,
        ):
            state = trainer.start()
        return int(state.step), jax.device_get((state.weights, state.optimizer))

    def serve(self, step: int | None = None) -> dict:
        """What infer.py does before its first token."""
        engine = Engine.from_run(self.config.run_dir, step=step)
        return jax.device_get(engine.model.stacked(engine.params))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    """Steps 3 and 6."""
    arguments = ["--training.steps=6", "--checkpoint.every_steps=3", "--mesh.data=8"]
    config = tiny_config(tmp_path_factory.mktemp("damage") / "run", *arguments)
    assert run.train(config) == "finished"
    alone = dataclasses.replace(config, mesh=MeshConfig())
    program = alone.make_program(make_mesh(alone.mesh, jax.devices()[:1]))
    saved = Saved(config, program, {}, {})
    for step in (3, 6):
        saved.served[step] = saved.serve(step)
        with Checkpointer(config.run_dir, None) as checkpointer:
            state, rows = program.abstract_state, program.model.layer_rows
            saved.trained[step] = jax.device_get(checkpointer.restore(step, state.weights, state.optimizer, rows)[:2])
    return saved


def same(got, want) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


@contextlib.contextmanager
def refused_by_name(*names: str) -> Iterator[list[str]]:
    """Gives a list that has the message if there is a refusal: one line with one of the names."""
    messages: list[str] = []
    try:
        yield messages
    except ValueError as error:
        messages.append(str(error))
        assert "\n" not in str(error) and any(name in str(error) for name in names), error


def middle_flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    for part in range(1, 8):
        changed[len(changed) * part // 8] ^= 16
    return bytes(changed)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "removed": lambda file: file.unlink(),
    "emptied": lambda file: file.write_bytes(b""),
    "cut": cut,
    "bytes flipped": lambda file: file.write_bytes(middle_flipped(file.read_bytes())),
    "other JSON": lambda file: file.write_text("[3]"),
}
OF_JSON = {
    "an empty object": lambda file: file.write_text("{}"),
    "huge numbers": lambda file: file.write_bytes(re.sub(rb"\d+", b"9" * 18, file.read_bytes())),
    "negative numbers": lambda file: file.write_bytes(re.sub(rb"\d+", b"-7", file.read_bytes())),
    "deep nesting": lambda file: file.write_text("[" * 100_000),
}


def files_of(folder: Path, only_json: bool) -> list[Path]:
    """Of those that hold arrays the largest of each item, and all others in which there is anything."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    data = [path for path in files if path.parent.name == "d"]
    largest = [max((path for path in data if item in path.parts), key=lambda path: path.stat().st_size)
               for item in ("params", "optimizer")]  # fmt: skip
    found = [path for path in files if path not in data or path in largest]
    return [path for path in found if not only_json or path.read_bytes().startswith(b"{")]


@pytest.mark.parametrize("damage", [
    pytest.param(name, marks=pytest.mark.slow if name in ("emptied", "cut") else ())
    for name in DAMAGE | OF_JSON
])  # fmt: skip
def test_with_a_damaged_file_in_a_step_it_is_used_as_it_was_or_the_one_before_is(saved, damage, tmp_path, caplog):
    newest = Path(saved.config.run_dir) / "checkpoints" / "6"
    is_of_json = damage == "other JSON" or damage in OF_JSON
    files = files_of(newest, only_json=is_of_json)
    assert len(files) >= (4 if is_of_json else 13)
    for number, file in enumerate(files):
        here = saved.copy(tmp_path / str(number))
        folder = Path(here.config.run_dir) / "checkpoints" / "6"
        (DAMAGE | OF_JSON)[damage](folder / file.relative_to(newest))
        caplog.clear()
        refusal = []
        if "optimizer" not in file.parts:
            # By its folder, or by what was read from it: where a flipped byte hits numbers, reading it succeeds.
            with refused_by_name(str(folder), f"{here.config.run_dir}, step 6") as refusal:
                assert same(here.serve(), saved.served[6]), file
        step, state = here.restore()
        assert step in (3, 6) and same(state, saved.trained[step]), file
        assert (step == 3) == (f"checkpoint 6 is not used: {folder}" in caplog.text), (file, caplog.text)
        assert step == 3 or not refusal or file.name == "_CHECKPOINT_METADATA", (file, refusal)
        shutil.rmtree(here.config.run_dir)


def test_with_damaged_files_beside_the_steps_the_run_goes_on_and_is_served_as_before(saved, tmp_path, caplog):
    """What they say is in the meta data of the steps too."""
    names = ("config.json", "data.json")
    here, now = saved.copy(tmp_path / "run"), tmp_path / "run"
    config = dataclasses.replace(saved.config, run_dir=str(now))
    for damage in (*DAMAGE.values(), OF_JSON["deep nesting"], lambda file: file.write_bytes(b"\xff\xfe")):
        for name in names:
            shutil.copyfile(Path(saved.config.run_dir) / name, now / name)
            damage(now / name)
        caplog.clear()
        assert run.check(here.config) == [] and Config.load(now).model == config.model
        run.load_data(here.config)
        assert all(str(now / name) in caplog.text for name in names if (now / name).exists() and name != "data.json")
    for name in names:
        (now / name).unlink()
    step, state = here.resume()
    assert step == 6 and same(state, saved.trained[6]) and same(here.serve(), saved.served[6])
    other_seed = dataclasses.replace(config, training=dataclasses.replace(config.training, seed=1))
    with pytest.raises(ValueError, match="other data, as step 6 in .* says .training.seed: 1234 -> 1"):
        run.load_data(other_seed)
    for file in (now / "checkpoints").glob("*/meta/metadata"):
        cut(file)
    with pytest.raises(ValueError, match="checkpoints/3/meta/metadata cannot be read"):
        here.serve(3)
    with pytest.raises(ValueError, match="config.json does not exist, and the metadata of no step can be read"):
        run.check(here.config)


@pytest.mark.parametrize("field", ["model.num_layers=6", "model.activation=gelu", "model.max_positions=64"])
def test_a_config_of_another_model_than_the_step_is_refused_with_the_difference(field, saved, tmp_path):
    here = saved.copy(tmp_path / "run")
    other = override(here.config, [f"--{field}"])
    (tmp_path / "run" / "config.json").write_text(other.to_json())
    name = field.split("=")[0]
    for use in (here.serve, lambda: run.check(other), lambda: export(tmp_path / "run", tmp_path / "out")):
        with pytest.raises(ValueError, match=f"config.json is not what step 6 was saved with .{name}: .*remove it"):
            use()
    (tmp_path / "run" / "config.json").unlink()
    assert same(here.serve(), saved.served[6])
    with pytest.raises(ValueError, match=f"cannot resume with other settings .{name}: "):
        run.check(other)


def test_layers_that_a_checkpoint_does_not_have_are_not_invented(saved):
    other = override(saved.config, ["--model.num_layers=3"])
    wanted = other.make_program(make_mesh(other.mesh))
    with (
        Checkpointer(saved.config.run_dir, None) as checkpointer,
        pytest.raises(
            ValueError, match="checkpoints/6 cannot be read .*layers.dense has 2 layers in the checkpoint and 3 here"
        ),
    ):
        checkpointer.restore_params(6, wanted.abstract_state.weights, wanted.model.layer_rows)


def test_a_step_under_the_number_of_another_is_not_used(saved, tmp_path, caplog):
    here = saved.copy(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copytree(checkpoints / "3", checkpoints / "9")
    with pytest.raises(ValueError, match="checkpoints/9/meta/metadata is damaged: it belongs to step 3, not 9"):
        here.serve()
    step, state = here.restore()
    assert step == 6 and same(state, saved.trained[6]) and (checkpoints / "9.damaged").is_dir()


def test_a_step_that_this_user_may_not_read_is_not_renamed(saved, tmp_path, monkeypatch):
    """Whoever runs the tests may be allowed everything, so the system is asked instead of the file."""
    here = saved.copy(tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "6" / "meta" / "metadata"
    file.unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != file.parent)
    with pytest.raises(ValueError, match="checkpoints/6: this user has no permission to read all of it"):
        here.restore()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["3", "6"]


def test_another_tokenizer_than_that_of_the_step_is_refused(saved, tmp_path):
    here = saved.copy(tmp_path / "run")
    other = override(here.config, ["--data.tokenizer=null:126"])
    (tmp_path / "run" / "config.json").write_text(other.to_json())
    with pytest.raises(ValueError, match="step 6 was trained with another tokenizer .tokenizer: null:127 -> null:126"):
        here.serve()


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_files_of_the_tokenizer_are_refused(damage, tmp_path):
    ranks = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (tmp_path / "bytes.tiktoken").write_text("\n".join(ranks))
    (tmp_path / "bytes.tiktoken.json").write_text('{"special_tokens": {"<|endoftext|>": 256}}')
    tokenizer, meta = load_tokenizer(str(tmp_path / "bytes.tiktoken")), tmp_path / "checkpoints" / "1" / "meta"
    meta.mkdir(parents=True)
    saved = {"tokenizer": tokenizer.identity, "eod_id": tokenizer.eod_id}
    (meta / "metadata").write_text(json.dumps(sealed(1, saved, {})))
    for name in ("tokenizer.tiktoken", "tokenizer.tiktoken.json"):
        for path in tmp_path.glob("tokenizer*"):
            path.unlink()
        save_tokenizer(tokenizer, tmp_path)
        assert tokenizer_of(tmp_path, 1, "bytes").identity == tokenizer.identity
        damage(tmp_path / name)
        refusal = rf"step 1 was trained with another tokenizer|^data.tokenizer: \S*/{re.escape(name)} "
        with pytest.raises(ValueError, match=refusal):
            tokenizer_of(tmp_path, 1, "bytes")
