"""The engine's programs as XLA compiles them for an H100, with the widths of Llama-3 8B: they copy neither weights nor
pages, convert no quantised weights in memory, and decode in one CUDA graph, when another process has lowered them; on
several GPUs too, without a collective of XLA."""

import pytest

PROGRAM = """
import functools, math, tempfile
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from benchmarks.hlo import Program
from megajax.inference.device import programs
from megajax.inference.device.batches import Batches, Shapes
from megajax.inference.device.compiler_options import LARGEST_JOINED, decode_options, prefill_options
from megajax.inference.device.packing import num_words, unpacked
from megajax.inference.device.programs import Rows
from megajax.inference.device.weights import FORMATS, joined_layers
from megajax.layers.attention.kv_cache import PoolSizes
from megajax.layers.attention.latent import LatentConfig
from megajax.layers.lora import AdapterChoice, LoraConfig, NamedAdapter
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.lowering import Job, Unlowered
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.quantization.weights import QuantizedWeight
from megajax.parameters import PerLayer, is_per_layer
from megajax.planning.plan import devices_without_gpu, plan_device

mesh = make_mesh(MeshConfig(), devices_without_gpu(1, plan_device("h100")))
sizes = PoolSizes(256, 64, 128, jnp.dtype(jnp.bfloat16))
shapes = Shapes.of(sizes, 4096, 2048, True, mixes=True)
replicated = NamedSharding(mesh.abstract_mesh, P())

def abstract(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated), tree)

def split(a, record):
    one = jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
    return PerLayer((one,) * a.shape[0]) if record.axes[:1] == ("layers",) else a

def quantized(model, params, format):
    def one(a, record):
        of = functools.partial(QuantizedWeight.of, num_inputs=record.num_inputs, format=format)
        return PerLayer(tuple(abstract(jax.eval_shape(of, b)) for b in a.arrays)) if record.is_quantizable else a
    return jax.tree.map(one, params, model.records, is_leaf=is_per_layer)

def in_groups(model, params):  # of 128 inputs, as folders have them
    def one(a, record):
        def of(matrix):
            inputs, outputs = matrix.shape[: record.num_inputs], matrix.shape[record.num_inputs :]
            of_groups = (math.prod(inputs) // 128, *outputs)
            levels = jnp.zeros((*outputs, *inputs[:-1], inputs[-1] // 2), jnp.uint8)
            scale, zero = jnp.zeros(of_groups, jnp.float16), jnp.zeros(of_groups, jnp.int8)
            return QuantizedWeight(levels, scale, None, "unchanged", zero)
        return PerLayer(tuple(abstract(jax.eval_shape(of, b)) for b in a.arrays)) if record.is_quantizable else a
    return jax.tree.map(one, params, model.records, is_leaf=is_per_layer)

def joined(model, params):
    return abstract(jax.eval_shape(functools.partial(joined_layers, model), params))

MiB = 2**20

def is_one_graph(dump):
    thunks = next(Path(dump).glob("*thunk_sequence_after_thunk_passes*")).read_text().splitlines()
    outermost = [line for line in thunks if line[:1].isdigit()]
    return len(outermost) == 1 and "kCommandBuffer" in outermost[0]

def check(mlp_dim, *names, transforms=(), **attention):
    attention = attention or dict(num_heads=32, num_kv_heads=8)
    model = Model(DecoderConfig(
        num_layers=1, embed_dim=4096, mlp_dim=mlp_dim, vocab_size=1024, position="rope", norm="rmsnorm",
        activation="swiglu", biases=(), tied_embeddings=False, **attention,
    ), adapters=transforms)
    vocab_size = model.config.vocab_size
    adapters = [name for transform in transforms for name in getattr(transform, "names", ())]
    batches = Batches(sizes, shapes, vocab_size, adapters=adapters)
    params = abstract(jax.tree.map(split, model.cast_weights(model.precision.compute_dtype), model.records))
    caches = abstract(jax.eval_shape(functools.partial(model.config.new_pages, sizes, model.execution)))
    rows = abstract(jax.eval_shape(functools.partial(Rows.zeros, sizes.num_rows, vocab_size)))
    pool_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(caches))
    decode = functools.partial(programs.decode, model, vocab_size, sizes, 4)
    prefill = functools.partial(programs.prefill, model, vocab_size, sizes)
    one_row, some_rows, many_rows, all_rows = (
        (*batches.empty_decode(*shapes.fitting_decode(number, 1)), np.int32(1)) for number in (1, 8, 32, 128)
    )
    prompt, mixed = (
        (*batches.empty_prefill(*shapes.fitting_prefill(shapes.chunks[-1], 32, number)), np.bool_(False), None)
        for number in (0, 1)
    )
    matrices = joined(model, params)
    calls = {"one row": (matrices, decode, one_row, 2 * MiB), "prompt": (matrices, prefill, prompt, 64 * MiB),
             "mixed": (matrices, prefill, mixed, 64 * MiB), "32 rows": (matrices, decode, many_rows, 8 * MiB)}
    for name, format in FORMATS.items():
        levels = joined(model, quantized(model, params, format))
        calls[name] = (levels, decode, one_row, 2 * MiB)
        if format.inputs == "by_rows":
            calls[f"{name}, prompt"] = (levels, prefill, prompt, 64 * MiB)
    # The parts of a product in 4 bits have up to 1.75 MiB, of 8 rows; the smallest copy of a matrix would have 32.
    in_4_bits = {"": (one_row, 4 * MiB), ", 8 rows": (some_rows, 16 * MiB), ", 128 rows": (all_rows, 32 * MiB)}
    for name, (given, large) in in_4_bits.items():
        calls[f"int4{name}"] = (joined(model, in_groups(model, params)), decode, given, large)
    for name in names or calls:
        weights, function, given, large = calls[name]
        if function is decode:
            options = decode_options(model, weights, mesh, len(given[0].positions_B))
        else:
            options = prefill_options(weights, mesh, len(given[0].tokens_T))
        dump = tempfile.mkdtemp()
        def call(weights, caches, rows, words):
            return function(weights, caches, rows, *unpacked(words, given))
        words = jax.ShapeDtypeStruct((num_words(given),), jnp.uint32, sharding=replicated)
        source = Unlowered(call, (weights, caches, rows, words), mesh, donated=(1, 2), out_shardings=None)
        lowered = source.lower_exported(*Job.of(source).export())  # as of another process
        compiled = lowered.compile(compiler_options=options | {"xla_dump_to": dump})
        program = Program(compiled.as_text())
        # A kernel that sorts many rows, which this compiler does not have, could not be in a graph.
        in_graph = is_one_graph(dump) and " sort(" not in compiled.as_text()
        written = [
            f"{one.name} {one.shape}" for name in program.run_computations() for one in program.computations[name]
            if one.opcode in ("fusion", "copy", "transpose") and one.bytes >= large and "scatter" not in one.name
            and "pad" not in one.name  # of a width whose sum XLA splits, as it cannot tune without a GPU
        ]
        in_place = compiled.memory_analysis().alias_size_in_bytes >= pool_bytes
        print(f"{name}: {options.get(LARGEST_JOINED)} {in_graph} {in_place} {written}")

with jax.set_mesh(mesh):
    check(14336)
    check(11040, "32 rows")  # a multiple of 32
    two = (NamedAdapter("one", 16, 2.0), NamedAdapter("two", 8, 2.0))
    check(14336, "one row", "32 rows", "mixed", transforms=(AdapterChoice(("*",), two),))
    check(14336, "one row", transforms=LoraConfig(rank=16).transforms)
    check(14336, "one row", num_heads=32, head_dim=128, latent=LatentConfig(kv_rank=512))
"""


@pytest.mark.cuda_wheels
def test_a_call_copies_no_weight_and_no_page(compile_for_hopper):
    assert compile_for_hopper(PROGRAM) == [
        "one row: 1000 True True []",
        "prompt: 0 True True []",
        "mixed: 0 True True []",
        "32 rows: 1000 True True []",
        "int8: 1000 True True []",
        "float8: 1000 True True []",
        "float8, prompt: 0 True True []",
        "int4: 0 True True []",
        "int4, 8 rows: 0 True True []",
        "int4, 128 rows: 0 True True []",
        "32 rows: 0 True True []",
        "one row: 1000 True True []",
        "32 rows: 1000 True True []",
        "mixed: 0 True True []",
        "one row: 0 True True []",
        "one row: 1000 True True []",
    ]


SEVERAL_GPUS = """
import dataclasses, functools, math, re, tempfile
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from megajax.inference.device import executor
from megajax.inference.device.batches import Batches, Shapes
from megajax.inference.device.compiler_options import decode_options, prefill_options
from megajax.inference.device.packing import num_words
from megajax.inference.device.programs import Rows
from megajax.inference.device.weights import _quantizer, shardings_of, FORMATS
from megajax.layers.attention.kv_cache import PoolSizes
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.lowering import Job, Unlowered
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.parameters import PerLayer, is_per_layer
from megajax.planning.plan import devices_without_gpu, plan_device
from megajax.quantization.weights import QuantizedWeight

mesh = make_mesh(MeshConfig(tensor=2), devices_without_gpu(2, plan_device("h100")))
dense = DecoderConfig(
    num_layers=2, embed_dim=4096, mlp_dim=14336, vocab_size=128256, position="rope", norm="rmsnorm",
    activation="swiglu", biases=(), tied_embeddings=False, num_heads=32, num_kv_heads=8,
)
experts = MoeConfig(num_experts=128, expert_dim=768, router=RouterConfig(top_k=8))
mixture = dataclasses.replace(dense, embed_dim=2048, head_dim=128, num_kv_heads=4, moe=experts)
sizes = PoolSizes(256, 64, 128, jnp.dtype(jnp.bfloat16))
batches = Batches(sizes, Shapes.of(sizes, 4096, 2048, True, mixes=True), dense.vocab_size, adapters=[])

def on_mesh(a, spec):
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh.abstract_mesh, spec))

def weight(a, record, sharding):
    if record.axes[:1] != ("layers",):
        return on_mesh(a, sharding.spec)
    return PerLayer((on_mesh(jax.ShapeDtypeStruct(a.shape[1:], a.dtype), P(*sharding.spec[1:])),) * a.shape[0])

def in_float8(node, record):
    if not is_per_layer(node) or not record.is_quantizable:
        return node
    with jax.set_mesh(mesh):
        of_layer = dataclasses.replace(record, axes=record.axes[1:])
        quantizer = _quantizer(of_layer, FORMATS["float8"], mesh)
        compiled = quantizer.lower(node.arrays[0]).compile()
    found = jax.eval_shape(quantizer, node.arrays[0])
    one = jax.tree.map(lambda a, sharding: on_mesh(a, sharding.spec), found, compiled.output_shardings)
    return PerLayer((one,) * len(node.arrays))

def in_groups(node, record):  # of 128 inputs, as folders have them
    if not is_per_layer(node) or not record.is_quantizable:
        return node
    inputs, outputs = np.split(node.arrays[0].shape, [record.num_inputs])
    of_groups = (math.prod(inputs) // 128, *outputs)
    levels = jax.ShapeDtypeStruct((*outputs, *inputs[:-1], inputs[-1] // 2), jnp.uint8)
    scale, zero = (jax.ShapeDtypeStruct(of_groups, dtype) for dtype in (jnp.float16, jnp.int8))
    weight = QuantizedWeight(levels, scale, None, "unchanged", zero)
    of_layer = dataclasses.replace(record, axes=record.axes[1:])
    shardings = shardings_of(of_layer, "unchanged", mesh, has_zero=True)
    one = jax.tree.map(lambda a, sharding: on_mesh(a, sharding.spec), weight, shardings)
    return PerLayer((one,) * len(node.arrays))

def without_mask(call):
    return call._replace(chooser=call.chooser._replace(mask_BW=executor.NO_MASK))

def say(name, model, params, function, host, masks, options):
    new_pages = functools.partial(model.config.new_pages, sizes, model.execution)
    with jax.set_mesh(mesh):
        pages = jax.jit(new_pages).lower().compile().output_shardings
    caches = jax.tree.map(lambda a, sharding: on_mesh(a, sharding.spec), jax.eval_shape(new_pages), pages)
    rows = jax.tree.map(lambda a: on_mesh(a, P()), jax.eval_shape(lambda: Rows.zeros(sizes.num_rows, 128256)))
    words = on_mesh(jax.ShapeDtypeStruct((num_words(host),), jnp.uint32), P())
    arguments = (params, caches, rows, words, *masks)
    source = Unlowered(function, arguments, mesh, donated=(1, 2), out_shardings=None)
    dump = tempfile.mkdtemp()
    lowered = source.lower_exported(*Job.of(source).export())
    compiled = lowered.compile(compiler_options=options | {"xla_dump_to": dump})
    thunks = next(Path(dump).glob("*thunk_sequence_after_thunk_passes*")).read_text().splitlines()
    kinds = [line.split()[1] for line in thunks if line[:1].isdigit()]
    collectives = re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?[(]", compiled.as_text())
    print(name, collectives, kinds)

def decode(name, config, format, num_rows):
    model, params = weights(config, format)
    batch, chooser = batches.empty_decode(*batches.shapes.fitting_decode(num_rows, 1))
    host = (batch, chooser._replace(mask_BW=executor.NO_MASK), np.int32(1), addresses)
    function = functools.partial(executor._decode, model, 128256, sizes, 4, host)
    options = decode_options(model, params, mesh, num_rows, has_mailboxes=True)
    say(name, model, params, function, host, (on_mesh(chooser.mask_BW, P()),), options)

def prefill(name, config, num_tokens):
    model, params = weights(config, "bfloat16")
    batch, chooser, beside = batches.empty_prefill(*batches.shapes.fitting_prefill(num_tokens, 8, 64))
    masks = (on_mesh(chooser.mask_BW, P()), on_mesh(beside.chooser.mask_BW, P()))
    host = (batch, chooser._replace(mask_BW=executor.NO_MASK), without_mask(beside), np.bool_(False), addresses)
    function = functools.partial(executor._prefill, model, 128256, sizes, host)
    options = prefill_options(params, mesh, len(batch.tokens_T), has_mailboxes=True)
    say(name, model, params, function, host, (*masks, None), options)

def weights(config, format):
    model = Model(config)
    leaves = model.cast_weights(model.precision.compute_dtype), model.records, model.shardings(mesh)
    params = jax.tree.map(weight, *leaves)
    if format != "bfloat16":
        change = in_float8 if format == "float8" else in_groups
        params = jax.tree.map(change, params, model.records, is_leaf=is_per_layer)
    return model, params

addresses = np.zeros((2, 2), np.uint32)
decode("decode bfloat16 2", dense, "bfloat16", 2)
decode("decode bfloat16 64", dense, "bfloat16", 64)
decode("decode float8 64", dense, "float8", 64)
decode("decode int4 2", dense, "int4", 2)
decode("decode mixture 2", mixture, "bfloat16", 2)
decode("decode mixture 128", mixture, "bfloat16", 128)
prefill("prompts", dense, 128)
prefill("prompts mixture", mixture, 896)
"""


@pytest.mark.cuda_wheels
def test_programs_of_several_gpus_are_one_graph_after_the_only_collective_of_xla(compile_for_hopper):
    """The collective is there for the order in which graphs are made and run."""
    decode = "bfloat16 2", "bfloat16 64", "float8 64", "int4 2", "mixture 2", "mixture 128"
    names = [f"decode {name}" for name in decode] + ["prompts", "prompts mixture"]
    kinds = ["kCommandBuffer", "kAsyncStart", "kCommandBuffer", "kAsyncDone", "kCommandBuffer"]
    assert compile_for_hopper(SEVERAL_GPUS) == [f"{name} ['all-reduce'] {kinds}" for name in names]
