"""The breakdown of a step: unions of intervals, kinds, and the places of the instructions."""

import contextlib
from pathlib import Path

import jax
import pytest

from benchmarks import profile
from benchmarks.places import Place, places
from benchmarks.profile import Kernel, as_text, breakdown, covered, kind_of, read_kernels

TEXT = """\
HloModule jit_train_step, is_scheduled=true

FileNames
1 "/home/someone/megajax/megajax/training/step.py"
2 "/home/someone/megajax/megajax/layers/feed_forward/mlp.py"
3 "/home/someone/megajax/megajax/ops/matmul.py"
4 "/usr/lib/site-packages/jax/numpy.py"

FunctionNames
1 "make_train_step.<locals>.train_step"
2 "Mlp.__call__"
3 "matmul"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=2 end_line=2 column=1 end_column=2}
3 {file_name_id=3 function_name_id=3 line=3 end_line=3 column=1 end_column=2}
4 {file_name_id=4 function_name_id=3 line=3 end_line=3 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=FIRST}
2 {file_location_id=2 parent_frame_id=SECOND}
3 {file_location_id=3 parent_frame_id=THIRD}
4 {file_location_id=4 parent_frame_id=FIRST}

%dynamic-slice-fusion.5 (p0: f32[8,8]) -> f32[8] {
  %p0 = f32[8,8]{1,0} parameter(0)
  %slice.4 = f32[8]{0} slice(%p0), slice={[0:1], [0:8]}, metadata={op_name="jit(step)/slice" stack_frame_id=1}
  ROOT %custom-call.5 = f32[8]{0} custom-call(%slice.4), metadata={op_name="jit(step)/dot" stack_frame_id=2}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %custom-call.1 = f32[8]{0} custom-call(%x), metadata={op_name="jit(step)/transpose(jvp())/dot" stack_frame_id=3}
  %copy.2 = f32[8]{0} copy(%x), metadata={op_name="jit(step)/copy" stack_frame_id=4}
  %dynamic_slice_fusion.5 = f32[8]{0} fusion(%x), kind=kCustom, calls=%dynamic-slice-fusion.5, metadata={}
  ROOT %loop_add_fusion = f32[8]{0} fusion(%x), calls=%add, metadata={op_name="jit(step)/add" stack_frame_id=1}
}
"""

PROFILE = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #13(Compute)"
    timestamp_ns: 100
    events { metadata_id: 1 offset_ps: 5000 duration_ps: 3000000 stats { metadata_id: 1 ref_value: 2 } }
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 1000000 }
  }
  lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 5 } }
  event_metadata { key: 1 value { id: 1 name: "nvjet_tst_1" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "custom-call.1" } }
}
planes { name: "/device:GPU:1" }
"""


def test_kernels_of_the_streams_of_the_first_gpu_are_read(tmp_path):
    data = jax.profiler.ProfileData.text_proto_to_serialized_xspace(PROFILE)
    (tmp_path / "host.xplane.pb").write_bytes(data)
    assert read_kernels(tmp_path) == [
        Kernel("nvjet_tst_1", "custom-call.1", 105, 3105),
        Kernel("nvjet_tst_1", "", 9100, 10100),
    ]


def test_folder_without_a_profile_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no profile of a GPU"):
        read_kernels(tmp_path)


@pytest.mark.parametrize("offset", [0, 1])  # jaxlib 0.10.2 prints the caller's number plus one
def test_the_location_is_the_innermost_informative_line_of_ours(offset):
    text = TEXT.replace("FIRST", str(offset)).replace("SECOND", str(1 + offset)).replace("THIRD", str(2 + offset))
    found = places(text)
    assert found == {
        "custom-call.1": Place("megajax/layers/feed_forward/mlp.py", "__call__", backward=True),
        "dynamic_slice_fusion.5": Place("megajax/layers/feed_forward/mlp.py", "__call__", backward=False),
        "loop_add_fusion": Place("megajax/training/step.py", "train_step", backward=False),
    }


def test_program_without_tables_has_no_places():
    assert places(TEXT[TEXT.index("ENTRY") :]) == {}


@pytest.mark.parametrize(
    ("name", "instruction", "file", "kind"),
    [
        ("nvjet_tst_128x256", "custom-call.4", "megajax/ops/cross_entropy.py", "matmul"),
        ("gemm_fusion_dot_12", "gemm_fusion_dot.12", "", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "custom-call", "megajax/ops/attention.py", "attention"),
        (
            "ncclDevKernel_AllGather_RING_LL",
            "all-gather-start.3",
            "megajax/layers/feed_forward/mlp.py",
            "communication",
        ),
        ("loop_select_fusion_1", "loop_select_fusion.1", "megajax/optim/optimizer.py", "optimizer"),
        ("input_reduce_fusion_1", "input_reduce_fusion.1", "megajax/ops/cross_entropy.py", "cross-entropy"),
        ("body", "mpmd_map.20", "pallas_kernels/norm.py", "norm"),
        ("body", "mpmd_map.0", "pallas_kernels/flash_attention/forward.py", "attention"),
        ("body", "mpmd_map.8", "megajax/ops/attention.py", "attention"),
        ("mosaic_gpu_kernel", "", "", "Pallas"),
        ("MemcpyD2D", "copy.3", "", "copy"),
        ("input_reduce_fusion", "input_reduce_fusion.2", "megajax/layers/feed_forward/mlp.py", "reduction"),
        ("loop_add_fusion", "loop_add_fusion", "megajax/layers/transformer.py", "element-wise"),
    ],
)
def test_kind_of_a_kernel(name, instruction, file, kind):
    place = Place(file, "f", backward=False) if file else None
    assert kind_of(Kernel(name, instruction, 0, 1), place) == kind


def test_union_of_intervals():
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (6, 6.5)]) == 5


def test_communication_is_exposed_while_nothing_else_runs():
    ms = 1e6
    kernels = [
        Kernel("nvjet_1", "", 0, 4 * ms),
        Kernel("ncclDevKernel_AllGather", "", 3 * ms, 6 * ms),  # 1 hidden, 2 exposed
        Kernel("ncclDevKernel_AllGather", "", 5 * ms, 7 * ms),  # overlaps itself: 1 more exposed
        Kernel("loop_add_fusion_3", "", 8 * ms, 10 * ms),
    ]
    found = breakdown(kernels, num_steps=2)
    assert found["step"] == 5 and found["idle"] == 0.5
    assert found["communication"] == {"exposed": 1.5, "hidden": 0.5}
    assert found["kinds"] == {"communication": 2.5, "matmul": 2.0, "element-wise": 1.0}
    assert found["kernels"][0] == {"name": "ncclDevKernel_AllGather", "time": 2.5, "calls": 1.0}
    assert "1.50 ms exposed, 0.50 hidden" in as_text(found)


def test_kernels_are_attributed_by_the_program():
    text = TEXT.replace("FIRST", "0").replace("SECOND", "1").replace("THIRD", "2")
    found = breakdown([Kernel("nvjet", "custom-call.1", 0, 3e6), Kernel("x", "unknown.1", 3e6, 4e6)], 1, text)
    assert found["places"][0] == {
        "kind": "matmul",
        "place": "megajax/layers/feed_forward/mlp.py __call__, backward",
        "time": 3.0,
    }
    assert found["with_place"] == 0.75


def test_a_block_is_recorded_when_it_has_ended(monkeypatch):
    kernel = Kernel("gemm", "", 0.0, 1.0)
    monkeypatch.setattr(profile.jax.profiler, "trace", lambda folder: contextlib.nullcontext())
    monkeypatch.setattr(profile, "read_kernels", lambda folder: [kernel] if Path(folder).is_dir() else [])
    with profile.recorded() as kernels:
        assert kernels == []
    assert kernels == [kernel]
