"""What was damaged on disk is found, named and not used; the newest whole step is."""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from megajax.checkpoint import verify
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.verify import digest, digests
from megajax.mesh.config import MeshConfig, make_mesh

ROWS = {}


DTYPES = (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.uint32)
by_row = jax.jit(jax.vmap(digest))  # of the arrays of a stack


def flips(raw, places, bits):
    """uint8 [n, bytes]: the bytes, in row k with the bits[k, :] of the bytes places[k, :] flipped."""
    flipped = np.tile(raw, (len(places), 1))
    for place, bit in zip(places.T, bits.T, strict=True):
        flipped[np.arange(len(places)), place] ^= np.uint8(1) << bit.astype(np.uint8)
    return flipped


def num_unseen(host, changed):
    """How many of the changed bytes, uint8 [n, bytes], have the digest of the array; those that are it left out."""
    changed = changed[(changed != np.frombuffer(host.tobytes(), np.uint8)).any(1)]
    stack = np.concatenate([host[None], changed.view(host.dtype).reshape(-1, *host.shape)])
    first, *others = np.asarray(by_row(stack)).tolist()
    assert len(others) == len(changed) > 0
    return others.count(first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_and_pairs_of_bits_change_the_digest(dtype):
    rng = np.random.default_rng(0)
    host = rng.standard_normal((3, 5)).astype(dtype)
    raw = np.frombuffer(host.tobytes(), np.uint8)
    place, bit = np.divmod(np.arange(8 * len(raw)), 8)
    assert num_unseen(host, flips(raw, place[:, None], bit[:, None])) == 0
    pairs = rng.integers(0, [[[len(raw)]], [[8]]], (2, 4000, 2))
    assert num_unseen(host, flips(raw, *pairs)) == 0


@pytest.mark.parametrize("dtype", (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn))
def test_signs_of_any_number_of_elements_and_elements_that_change_places_are_seen(dtype):
    """A weighted sum of the bits misses every even number of flipped signs."""
    rng = np.random.default_rng(0)
    for host in (np.ones((4, 6), dtype), rng.standard_normal((4, 6)).astype(dtype)):
        signs = np.where(rng.integers(0, 2, (2000, *host.shape)), host, -host)
        assert num_unseen(host, np.concatenate([signs, -host[None]]).reshape(2001, -1).view(np.uint8)) == 0
    moved = np.stack([host, *(rng.permutation(host.reshape(-1)).reshape(host.shape) for _ in range(500))])
    assert num_unseen(host, moved.reshape(501, -1).view(np.uint8)) == 0


def test_each_bit_of_an_element_changes_each_bit_of_the_digest_about_half_of_the_time():
    values = np.random.default_rng(0).integers(0, 2**32, 4000, np.uint32)
    base = by_row(values[:, None])
    for bit in range(32):
        changed = np.asarray(by_row(values[:, None] ^ np.uint32(1 << bit)) ^ base)
        share = (changed[:, :, None] >> np.arange(32, dtype=np.uint32) & 1).mean(0)
        assert share.min() > 0.45 and share.max() < 0.55  # six standard deviations are 0.047


def test_booleans_and_elements_of_8_bytes_have_a_digest():
    assert digest(jnp.array([True, False])).tolist() != digest(jnp.array([False, True])).tolist()
    with jax.enable_x64(True):
        wide = np.arange(6.0).reshape(2, 3)
        seen = {tuple(digest(jnp.asarray(array)).tolist()) for array in (wide, -wide, wide.T.copy(), wide + 2**-40)}
    assert len(seen) == 4


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_the_digest_is_one_pass_over_the_array(dtype):
    """One reduction makes both numbers, of what is fused into it."""
    array = jax.ShapeDtypeStruct((64, 128), dtype)
    assert jax.jit(digest).lower(array).as_text().count("stablehlo.reduce(") == 1


def arrays_on(mesh, step=0):
    rng = np.random.default_rng(step)
    specs = {"w": ("fsdp", "tensor"), "b": (None,), "scale": ()}
    shapes = {"w": (64, 128), "b": (640,), "scale": ()}
    place = lambda name: jax.NamedSharding(mesh, jax.P(*specs[name]))
    return {name: jax.device_put(np.float32(rng.standard_normal(shape)), place(name)) for name, shape in shapes.items()}


def abstract(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def mesh_of(**sizes):
    config = MeshConfig(**sizes)
    return make_mesh(config, jax.devices()[: config.num_devices])


def test_digests_are_the_same_on_every_mesh_and_in_host_memory():
    want = digests(arrays_on(mesh_of()))
    assert len({str(digest) for _, digest in want.values()}) == 3
    for mesh in (mesh_of(fsdp=4, tensor=2), mesh_of(tensor=8)):
        tree = arrays_on(mesh)
        assert digests(tree) == want
        assert (
            digests(jax.device_put(tree, jax.tree.map(lambda a: a.sharding.with_memory_kind("pinned_host"), tree)))
            == want
        )


def test_arrays_that_are_wanted_in_another_dtype_are_verified_as_they_were_saved(run_dir):
    """As serving wants them: matrices in bfloat16."""
    mesh, want = mesh_of(tensor=2), jax.device_get(arrays_on(mesh_of(), 6))
    tree = abstract(arrays_on(mesh))
    tree["w"] = jax.ShapeDtypeStruct(tree["w"].shape, ml_dtypes.bfloat16, sharding=tree["w"].sharding)
    with Checkpointer(run_dir, None) as checkpointer:
        params = checkpointer.restore_params(6, tree, ROWS)
    assert params["w"].dtype == ml_dtypes.bfloat16 and params["w"].sharding.is_equivalent_to(tree["w"].sharding, 2)
    assert np.array_equal(params["w"], want["w"].astype(ml_dtypes.bfloat16)) and np.array_equal(params["b"], want["b"])
    file = max(data_files(run_dir / "checkpoints" / "6" / "params"), key=lambda path: path.stat().st_size)
    flip(file, file.stat().st_size // 2)
    with Checkpointer(run_dir, None) as checkpointer, pytest.raises(ValueError, match="params.*is not what was saved"):
        checkpointer.restore_params(6, tree, ROWS)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A run directory with the steps 3 and 6."""
    run_dir = tmp_path_factory.mktemp("run")
    with Checkpointer(run_dir, CheckpointConfig(keep=0)) as checkpointer:
        for step in (3, 6):
            tree = arrays_on(mesh_of(fsdp=4, tensor=2), step)
            meta = {"step": step, "layer_rows": {"layers.decoder": [0, 1, 2, 3]}}
            checkpointer.save(step, tree, {"m": tree["w"]}, meta)
    return run_dir


@pytest.fixture
def run_dir(template, tmp_path):
    shutil.copytree(template, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def restore(run_dir, mesh=None):
    tree = abstract(arrays_on(mesh or mesh_of(fsdp=2)))
    with Checkpointer(run_dir, CheckpointConfig(keep=0)) as checkpointer:
        return checkpointer.restore_newest(tree, {"m": tree["w"]}, ROWS), checkpointer.steps()


def data_files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096)


def flip(path, place, bit=4):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.fault
def test_one_flipped_bit_in_the_meta_data_is_found(run_dir):
    """They say, among others, which row is which layer."""
    file, tree = run_dir / "checkpoints" / "6" / "meta" / "metadata", abstract(arrays_on(mesh_of()))
    good = file.read_bytes()
    assert b'"layer_rows": {"layers.decoder": [0, 1, 2, 3]}' in good and b'"sha256"' in good
    for damaged in (good.replace(b"[0, 1, 2, 3]", b"[0, 1, 0, 3]"), good.replace(b'"step": 6', b'"step": 4'), good):
        file.write_bytes(damaged)
        with Checkpointer(run_dir, None) as checkpointer:
            if damaged is good:
                assert checkpointer.read_meta(6)["step"] == 6
                continue
            with pytest.raises(ValueError, match="damaged: its metadata is not what was saved"):
                checkpointer.restore(6, tree, {"m": tree["w"]}, ROWS)


@pytest.mark.fault
@pytest.mark.parametrize("left_out", [("step", "digests", "sha256"), ("digests", "sha256"), ("sha256",), ("step",)])
def test_a_step_without_what_verifies_it_is_not_used(run_dir, left_out, caplog):
    """Its parameters are those of another step, so whoever believed it would train on these."""
    folder = run_dir / "checkpoints"
    shutil.rmtree(folder / "6" / "params")
    shutil.copytree(folder / "3" / "params", folder / "6" / "params")
    file = folder / "6" / "meta" / "metadata"
    file.write_text(json.dumps({name: value for name, value in json.loads(file.read_text()).items()
                                if name not in left_out}))  # fmt: skip
    (step, _, _, meta), _ = restore(run_dir)
    assert step == meta["step"] == 3 and (folder / "6.damaged").is_dir()
    assert f"metadata is damaged: it has no {', '.join(left_out)}; use another step" in caplog.text


@pytest.mark.fault
def test_one_flipped_bit_in_any_large_file_is_never_trained_on(run_dir):
    rng, found = random.Random(0), 0
    want = jax.device_get(arrays_on(mesh_of(), 6))
    files = data_files(run_dir / "checkpoints" / "6")
    assert files
    assert restore(run_dir)[0][0] == 6  # what is not damaged is used
    for file in files:
        good = file.read_bytes()
        for _ in range(4):
            flip(file, rng.randrange(len(good)), rng.randrange(8))
            with Checkpointer(run_dir, None) as checkpointer:
                tree = abstract(arrays_on(mesh_of()))
                try:
                    params, optimizer, _ = checkpointer.restore(6, tree, {"m": tree["w"]}, ROWS)
                except Exception:
                    found += 1
                else:  # the flip hit nothing that is read
                    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(params), want))
                    assert np.array_equal(optimizer["m"], want["w"])
            file.write_bytes(good)
    assert found >= 2


@pytest.mark.fault
def test_a_damaged_array_is_named_and_the_step_before_is_used(run_dir, caplog):
    file = max(data_files(run_dir / "checkpoints" / "6" / "params"), key=lambda path: path.stat().st_size)
    flip(file, file.stat().st_size // 2)
    (step, params, _, meta), steps = restore(run_dir)
    assert step == meta["step"] == 3 and steps == [3]
    assert np.array_equal(params["w"], jax.device_get(arrays_on(mesh_of(), 3)["w"]))
    assert "checkpoint 6 is not used" in caplog.text and "params['w'] is not what was saved" in caplog.text
    assert (run_dir / "checkpoints" / "6.damaged").is_dir()
    assert os.readlink(run_dir / "latest") == "checkpoints/3"
    # The step can be saved again, and is then used.
    tree = arrays_on(mesh_of(fsdp=2), 7)
    with Checkpointer(run_dir, CheckpointConfig(keep=0)) as checkpointer:
        checkpointer.save(6, tree, {"m": tree["w"]}, {"step": 6})
    assert restore(run_dir)[0][0] == 6


@pytest.mark.fault
def test_a_step_whose_arrays_have_all_signs_flipped_on_disk_is_not_used(run_dir, tmp_path, caplog):
    tree = arrays_on(mesh_of(fsdp=4, tensor=2), 6)
    negated = {name: array if name == "scale" else -array for name, array in tree.items()}
    with Checkpointer(tmp_path / "negated", CheckpointConfig(keep=0)) as checkpointer:
        checkpointer.save(6, negated, {"m": tree["w"]}, {"step": 6})
    shutil.rmtree(run_dir / "checkpoints" / "6" / "params")
    shutil.copytree(tmp_path / "negated" / "checkpoints" / "6" / "params", run_dir / "checkpoints" / "6" / "params")
    (step, *_), _ = restore(run_dir)
    assert step == 3 and "params['b'], params['w'] are not what was saved" in caplog.text


def _cut(folder):
    file = data_files(folder / "params")[0]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGE = {
    "cut": _cut,
    "file gone": lambda folder: data_files(folder / "params")[0].unlink(),
    "meta gone": lambda folder: shutil.rmtree(folder / "meta"),
    "empty": _empty,
}


@pytest.mark.fault
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.fault
def test_an_incomplete_step_is_passed_over_with_a_line_that_says_why(run_dir, damage, caplog):
    damage(run_dir / "checkpoints" / "6")
    (step, *_), _ = restore(run_dir)
    lines = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert step == 3 and len(lines) == 1 and "\n" not in lines[0]


@pytest.mark.fault
@pytest.mark.parametrize("name", ["params/_METADATA", "commit_success.txt", "_CHECKPOINT_METADATA"])
def test_a_step_whose_arrays_are_all_there_is_used_whatever_else_is_gone(run_dir, name):
    """The digests say that it is what was saved."""
    (run_dir / "checkpoints" / "6" / name).unlink(missing_ok=True)
    (step, params, _, _), _ = restore(run_dir)
    assert step == 6 and np.array_equal(params["w"], jax.device_get(arrays_on(mesh_of(), 6)["w"]))


@pytest.mark.fault
def test_if_no_step_is_whole_nothing_is_touched_and_all_reasons_are_said(run_dir):
    for step in ("3", "6"):
        _empty(run_dir / "checkpoints" / step)
    with pytest.raises(ValueError, match="no step can be used .step 6: .*; step 3: .*--run_dir"):
        restore(run_dir)
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"3", "6"}


def test_a_checkpoint_for_another_optimizer_is_not_called_damaged(run_dir):
    tree = abstract(arrays_on(mesh_of()))
    with (
        Checkpointer(run_dir, CheckpointConfig(keep=0)) as checkpointer,
        pytest.raises(ValueError, match="no step can"),
    ):
        checkpointer.restore_newest(tree, {"m": tree["w"], "v": tree["w"]}, ROWS)
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"3", "6"}


def test_every_nth_checkpoint_stays_beside_the_newest(tmp_path):
    tree = arrays_on(mesh_of())
    with Checkpointer(tmp_path, CheckpointConfig(keep=1, keep_every_steps=2)) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, tree, {"m": tree["w"]}, {})
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "4", "5"}


@pytest.mark.fault
def test_a_save_that_fails_is_reported_and_counted_and_the_next_one_succeeds(tmp_path, caplog):
    """No file may grow above 1 kB: what a full disk does, at the same place."""
    tree = arrays_on(mesh_of())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpointer(tmp_path, CheckpointConfig(keep=0)) as checkpointer:
        checkpointer.save(1, tree, {"m": tree["w"]}, {"step": 1})
        checkpointer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            checkpointer.save(2, tree, {"m": tree["w"]}, {"step": 2})
            for _ in range(200):
                checkpointer.check()
                if checkpointer.failed_saves:
                    break
                time.sleep(0.05)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert checkpointer.failed_saves == 1 and "could not be saved (failure 1)" in caplog.text
        assert list((tmp_path / "checkpoints").glob("2.*tmp"))
        checkpointer.save(3, tree, {"m": tree["w"]}, {"step": 3})
        checkpointer.wait()
        assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "3"}
        assert checkpointer.steps() == [1, 3]
    assert restore(tmp_path)[0][0] == 3 and checkpointer.failed_saves == 1


FULL = """
import resource, sys
import jax.numpy as jnp
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.training.reporting.console import log_to_stderr

log_to_stderr()
tree = {"w": jnp.sin(jnp.arange(8192.0)), "b": jnp.ones(640)}
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
with Checkpointer(sys.argv[1], CheckpointConfig()) as checkpointer:
    for step in range(1, 11):
        checkpointer.save(step, tree, {"m": tree["w"]}, {})
print(checkpointer.failed_saves)
"""


@pytest.mark.fault
def test_a_full_disk_is_a_few_lines_in_the_log_however_many_saves_fail(tmp_path):
    """As above in test_a_save_that_fails; nothing else may hide its reason."""
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "10\n", done.stderr
    lines = done.stderr.splitlines()
    ours = [line for line in lines if line.startswith("megajax: a checkpoint could not be saved (failure 1): ")]
    assert len(ours) == 1 and len(lines) < 25 and max(map(len, lines)) < 1200, done.stderr


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_a_digest_is_the_sum_of_those_of_its_parts(dtype):
    x = np.random.default_rng(0).integers(0, 100, (3, 5, 7)).astype(dtype)
    parts = np.split(x.reshape(-1), [24, 48, 50])
    assert verify.digest_of_pieces(parts) == digest(jnp.asarray(x)).tolist()
