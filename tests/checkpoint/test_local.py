"""A snapshot on the fast disk of a machine is used bit for bit where it fits; elsewhere the checkpoint is, and why."""

import resource
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.local import run_folder
from megajax.mesh.config import MeshConfig, make_mesh

ROWS = {"layers.decoder": np.arange(4, dtype=np.int32)}
SPECS = {"w": ("fsdp", "tensor"), "b": (None,), "half": (None, "data"), "scale": ()}
SHAPES = {"w": (64, 128), "b": (640,), "half": (4, 8), "scale": ()}
MESH = dict(data=2, fsdp=2, tensor=2)


def mesh_of(**sizes):
    config = MeshConfig(**sizes)
    return make_mesh(config, jax.devices()[: config.num_devices])


def arrays_on(mesh, seed):
    rng = np.random.default_rng(seed)
    place = lambda name: jax.NamedSharding(mesh, jax.P(*SPECS[name]))
    dtype = lambda name: ml_dtypes.bfloat16 if name == "half" else np.float32
    draw = lambda name: np.asarray(rng.standard_normal(SHAPES[name])).astype(dtype(name))
    return {name: jax.device_put(draw(name), place(name)) for name in SPECS}


def moments_of(params):
    """On the host, as offloaded ones are."""
    return {"m": jax.device_put(params["w"], params["w"].sharding.with_memory_kind("pinned_host"))}


def abstract(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def config_of(tmp_path):
    return CheckpointConfig(keep=0, local_dir=str(tmp_path / "fast"), local_every_steps=2)


def meta_of(step):
    return {"step": step, "layer_rows": {kind: rows.tolist() for kind, rows in ROWS.items()}}


def train(tmp_path, checkpoints=(4,), snapshots=(6, 8)):
    """Saves these steps, and then is killed: nothing is tidied up as at an end."""
    checkpointer = Checkpointer(tmp_path / "run", config_of(tmp_path))
    for step in checkpoints:
        params = arrays_on(mesh_of(**MESH), step)
        checkpointer.save(step, params, moments_of(params), meta_of(step))
    for step in snapshots:
        params = arrays_on(mesh_of(**MESH), step)
        checkpointer.save_local(step, params, moments_of(params), meta_of(step))
    checkpointer.wait()
    checkpointer.wait_for_local()
    return checkpointer


def resume(tmp_path, rows=ROWS, run="run", **sizes):
    target = abstract(arrays_on(mesh_of(**sizes or MESH), 0))
    with Checkpointer(tmp_path / run, config_of(tmp_path)) as checkpointer:
        return checkpointer.restore_newest(target, abstract(moments_of(arrays_on(mesh_of(**sizes or MESH), 0))), rows)


def folders(tmp_path):
    return sorted(int(path.name) for path in (tmp_path / "fast").glob("*/*"))


def test_a_snapshot_newer_than_the_checkpoint_is_restored_bit_for_bit_where_it_lay(tmp_path):
    train(tmp_path)
    step, params, optimizer, meta = resume(tmp_path)
    want = arrays_on(mesh_of(**MESH), 8)
    assert step == 8 and meta == meta_of(8)
    with Checkpointer(tmp_path / "run", None) as checkpointer:  # so that serving and the next start find it there
        assert checkpointer.latest_step() == 8
    wanted = want | moments_of(want)
    shutil.rmtree(tmp_path / "fast", ignore_errors=True)
    again = resume(tmp_path)  # from the checkpoint that was saved at once
    assert again[0] == 8
    for name, array in (params | optimizer).items():
        assert array.sharding == wanted[name].sharding and array.dtype == wanted[name].dtype
        assert jax.device_get(array).tobytes() == jax.device_get(wanted[name]).tobytes()
        assert jax.device_get((again[1] | again[2])[name]).tobytes() == jax.device_get(wanted[name]).tobytes()


def test_what_is_restored_can_be_given_away_to_a_step(tmp_path):
    train(tmp_path)
    _, params, *_ = resume(tmp_path)
    doubled = jax.jit(lambda tree: jax.tree.map(lambda a: a + a, tree), donate_argnums=0)(params)
    want = arrays_on(mesh_of(**MESH), 8)
    assert all(np.array_equal(doubled[name], want[name] + want[name]) for name in want)


@pytest.mark.fault
def test_what_a_killed_process_left_half_written_is_removed_and_the_one_before_is_used(tmp_path):
    train(tmp_path)
    (run_folder,) = (tmp_path / "fast").iterdir()
    shutil.copytree(run_folder / "8" / "process_0", run_folder / "10" / "process_0.new")
    assert resume(tmp_path)[0] == 8
    assert not any((tmp_path / "fast").iterdir())


def _flip(folder):
    content = bytearray((folder / "arrays").read_bytes())
    content[-1] ^= 4
    (folder / "arrays").write_bytes(content)


DAMAGE = {
    "a bit": (_flip, "is not what was saved"),
    "cut": (
        lambda folder: (folder / "arrays").write_bytes((folder / "arrays").read_bytes()[:9000]),
        "the file is truncated",
    ),
    "no arrays": (lambda folder: (folder / "arrays").unlink(), "No such file"),
    "half an index": (lambda folder: (folder / "index.json").write_text('{"meta": {'), "Expecting"),
}


@pytest.mark.fault
@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_snapshot_is_not_used_and_the_log_says_why(damage, reason, tmp_path, caplog):
    train(tmp_path, snapshots=(8,))
    (folder,) = (tmp_path / "fast").glob("*/8/process_0")
    damage(folder)
    step, params, *_ = resume(tmp_path)
    assert step == 4 and np.array_equal(params["w"], arrays_on(mesh_of(**MESH), 4)["w"])
    lines = [record.getMessage() for record in caplog.records if "local snapshot 8 is not used" in record.getMessage()]
    assert len(lines) == 1 and reason in lines[0]


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (dict(fsdp=4, data=2), "on another mesh"),
        (dict(rows={"layers.decoder": ROWS["layers.decoder"].reshape(2, 2)}), "with another pipeline layout"),
    ],
)
def test_another_mesh_takes_the_checkpoint_and_says_why(others, reason, tmp_path, caplog):
    train(tmp_path)
    assert resume(tmp_path, **others)[0] == 4
    assert f"the local snapshot 8 is not used: it was saved {reason}" in caplog.text


def test_a_snapshot_older_than_the_checkpoint_is_not_used_and_goes_at_the_end(tmp_path):
    train(tmp_path, checkpoints=(4, 12))
    assert resume(tmp_path)[0] == 12
    assert not any((tmp_path / "fast").iterdir())


def test_a_snapshot_between_a_damaged_checkpoint_and_the_one_before_is_used(tmp_path, caplog):
    train(tmp_path, checkpoints=(4, 12))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "12" / "params")
    assert resume(tmp_path)[0] == 8
    assert "checkpoint 12 is not used" in caplog.text and (tmp_path / "run" / "checkpoints" / "12.damaged").is_dir()
    with Checkpointer(tmp_path / "run", None) as checkpointer:
        assert checkpointer.latest_step() == 8


def test_a_new_run_in_the_same_place_and_a_copy_of_a_run_do_not_see_its_snapshots(tmp_path):
    train(tmp_path)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
    assert resume(tmp_path, run="copy")[0] == 4
    shutil.rmtree(tmp_path / "run")
    assert resume(tmp_path) is None


def test_the_newest_two_stay_and_those_that_the_run_did_not_go_on_from_go(tmp_path):
    train(tmp_path, snapshots=(6, 8, 10))
    assert folders(tmp_path) == [8, 10]
    train(tmp_path, checkpoints=(), snapshots=(6,))
    assert folders(tmp_path) == [6]


@pytest.mark.fault
def test_a_snapshot_that_cannot_be_written_is_counted_and_the_next_one_succeeds(tmp_path, caplog):
    params, before = arrays_on(mesh_of(**MESH), 1), resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpointer = Checkpointer(tmp_path / "run", config_of(tmp_path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        checkpointer.save_local(2, params, {}, meta_of(2))
        checkpointer.wait_for_local()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpointer.failed_saves == 1 and "a local snapshot could not be saved (failure 1)" in caplog.text
    assert folders(tmp_path) == []
    checkpointer.save_local(4, params, {}, meta_of(4))
    checkpointer.wait_for_local()
    assert folders(tmp_path) == [4] and checkpointer.failed_saves == 1


def test_only_the_steps_that_were_asked_for_are_due(tmp_path):
    with Checkpointer(tmp_path / "run", config_of(tmp_path)) as checkpointer:
        assert [step for step in range(1, 7) if checkpointer.local_is_due(step)] == [2, 4, 6]
    with Checkpointer(tmp_path / "run", CheckpointConfig()) as checkpointer:
        assert not any(checkpointer.local_is_due(step) for step in range(1, 7))


def test_half_a_setting_and_a_directory_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ValueError, match="local_every_steps=0.*need both"):
        CheckpointConfig(local_dir="/dev/shm").check()
    with pytest.raises(ValueError, match="local_every_steps=5.*need both"):
        CheckpointConfig(local_every_steps=5).check()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is not a writable directory.*--checkpoint.local_dir"):
        CheckpointConfig(local_dir=str(tmp_path / "file" / "x"), local_every_steps=5).check_local_dir()
    CheckpointConfig(local_dir=str(tmp_path / "new"), local_every_steps=5).check_local_dir()


@pytest.mark.fault
@pytest.mark.parametrize("content", [b"", b"[3]", b"\xff", b"0123"])
def test_a_damaged_run_id_is_replaced_and_the_log_says_that_snapshots_are_lost(content, tmp_path, caplog):
    before = run_folder(tmp_path / "local", tmp_path)
    assert run_folder(tmp_path / "local", tmp_path) == before and not caplog.records
    (tmp_path / "run_id").write_bytes(content)
    after = run_folder(tmp_path / "local", tmp_path)
    assert after != before and "run_id cannot be read" in caplog.text
    assert run_folder(tmp_path / "local", tmp_path) == after
