"""The sharding table: logical axis of an array -> mesh axes. To change a sharding, change this table, or the exceptions
below it: `split_by` for the matrices of experts, `activation_spec` for `tensor` between blocks.

The metadata of a parameter (megajax/parameters.py) has its logical axes, an activation goes through `constrain`, and
an operation that XLA cannot partition well runs in `manual` (megajax/mesh/current.py) with the specs made here. These
functions read the current mesh and ignore axes over which the caller is already manual (a pipeline stage).
"""

import math
from collections.abc import Collection, Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.mesh import compat
from megajax.mesh.current import free_axes, has_mesh, mailbox_addresses, manual

BATCH_AXES = ("data", "fsdp", "expert")
TIME_AXES = ("context",)  # split the sequence everywhere
SEQUENCE_AXES = ("tensor",)  # also split it between blocks (sequence parallelism)
SEQUENCES = (*BATCH_AXES, *SEQUENCE_AXES)  # split the batch between blocks, where there are enough sequences
HEAD_AXES = ("tensor",)

WEIGHT_AXES: dict[str | None, tuple[str, ...]] = {
    "chunks": (),  # virtual stages of a device, see parallel/schedule.py
    "layers": ("pipeline",),
    "embed": ("fsdp", "context"),  # context also shards the weights
    "latent": ("fsdp", "context"),  # of latent attention, where it is the input of a matrix
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("pipeline", "tensor"),  # all stages share the work of embedding and output layer
    "experts": ("expert",),
    "positions": ("pipeline", "tensor"),
    "head_dim": (),
    "norm": (),
    "buckets": (),  # of relative positions
    "router": (),  # one entry an expert
    "rank": (),  # of an adapter
    "classes": (),  # the few rows of a token type embedding, the few outputs of a classifier
    "pixels": (),  # of a patch of an image, the positions of its patches; taps and mels of a convolution of sound
}

ACTIVATION_AXES: dict[str | None, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "sequence": (*TIME_AXES, *SEQUENCE_AXES),
    "time": TIME_AXES,  # inside a block, where heads or width are split
    "heads": HEAD_AXES,
    "kv_heads": HEAD_AXES,
    "mlp": ("tensor",),
    "vocab": ("pipeline", "tensor"),
    "blocks": (*TIME_AXES, *SEQUENCE_AXES),  # of images, see parallel/encode.py
    "rows": (*BATCH_AXES, *TIME_AXES),  # of tokens, sorted by expert
    "embed": ("tensor",),  # of these rows only
    None: (),
}


SHARING_AXES = WEIGHT_AXES["embed"]  # share one copy of the weights, which is gathered where it is used


def num_parts(axes: Sequence[str], sizes: Mapping[str, int], *, but: Collection[str] = ()) -> int:
    """Number of shards of a parameter on a mesh with axes of these sizes; the axes in `but` count as 1."""
    return math.prod(sizes[name] for axis in axes for name in WEIGHT_AXES[axis] if name not in but)


def weight_spec(axes: Sequence[str]) -> P:
    """PartitionSpec of a parameter with these logical axes, unless it holds matrices of experts."""
    return P(*(entry_of(WEIGHT_AXES[axis]) for axis in axes))


def local_weight_spec(axes: Sequence[str], axis_names) -> P:
    """weight_spec restricted to these mesh axes: for a region that is manual over them, or over all others."""
    return _local([WEIGHT_AXES[axis] for axis in axes], axis_names)


def splits_experts(num_experts: int, sizes: Mapping[str, int]) -> bool:
    """Whether the axes that share the weights split these experts, instead of the matrix of each, on a mesh with axes
    of these sizes. What is gathered and scattered is contiguous then."""
    return num_experts % math.prod(sizes.get(name, 1) for name in (*WEIGHT_AXES["experts"], *SHARING_AXES)) == 0


def split_by(axes: Sequence[str], num_experts: int, sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """For each dim of a parameter the mesh axes that split it. num_experts: whose matrices it holds; 1 for others."""
    found = {axis: WEIGHT_AXES[axis] for axis in axes}
    if num_experts > 1 and splits_experts(num_experts, sizes):
        found |= {"experts": (*found["experts"], *found["embed"]), "embed": ()}
    return [found[axis] for axis in axes]


def local_experts_spec(axes: Sequence[str], num_experts: int) -> P:
    """PartitionSpec of matrices of experts, restricted to the axes that the caller is not manual over."""
    free = free_axes()
    return _local(split_by(axes, num_experts, free), free)


def parameter_spec(record, sizes: Mapping[str, int]) -> P:
    """PartitionSpec of the parameter with this record on a mesh with axes of these sizes."""
    return P(*map(entry_of, split_by(record.axes, record.num_experts, sizes)))


def _local(names_of_dims: Sequence[tuple[str, ...]], axis_names: Collection[str]) -> P:
    return P(*(entry_of(tuple(name for name in names if name in axis_names)) for names in names_of_dims))


def weight_shardings(records, mesh: Mesh | AbstractMesh):
    """Pytree of Parameter records -> pytree of NamedSharding."""
    return jax.tree.map(lambda record: NamedSharding(mesh, parameter_spec(record, mesh.shape)), records)


def batch_spec(dims: Sequence[str | None] = ("time",)) -> P:
    """PartitionSpec of an array of a batch, [microbatches, batch, *dims], with the logical axes of dims."""
    return P(None, *(entry_of(ACTIVATION_AXES[axis]) for axis in ("batch", *dims)))


def entry_of(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """The entry of a PartitionSpec for these mesh axes."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def axes_of(entry) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def with_shardings(abstract, shardings):
    """Abstract arrays with these shardings (both pytrees of the same structure)."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)


def row_major(params, records):
    """Arrays sharded like parameters with these records, each shard stored with its last dim contiguous.

    Reducing a gradient over fsdp along its last dim makes XLA store it transposed; the optimizer would then use the
    same layout, and transpose parameter and moments back and forth: six arrays instead of one. If the last dim is not
    split there is nothing to reduce along it, and XLA chooses the layout.
    """
    sizes = free_axes()

    def relayout(record, x):
        spec = parameter_spec(record, sizes)
        if not spec or math.prod(sizes.get(name, 1) for name in axes_of(spec[-1])) == 1:
            return x
        return manual(compat.row_major, (spec,), spec)(x)

    return jax.tree.map(relayout, records, params)


def activation_spec(shape: Sequence[int], axes: Sequence[str | None]) -> P:
    """PartitionSpec of an activation on the current mesh.

    A mesh axis that does not divide its dim is left out: one token of a decoding step cannot be split over `tensor`.
    (This does not happen in training: Config.check refuses such sizes.) Where there are enough sequences, `tensor`
    splits them instead of each sequence between blocks, so that parts which are gathered and scattered are contiguous.
    """
    sizes = free_axes()
    dims = dict(zip(axes, shape, strict=True))
    names = ACTIVATION_AXES

    def divide(names: Sequence[str], dim: int) -> bool:
        return dim % math.prod(sizes.get(name, 1) for name in names) == 0

    if "sequence" in dims:
        if mailbox_addresses() is not None:
            names = names | {"sequence": TIME_AXES}
        elif divide(SEQUENCES, dims["batch"]) and divide(names["sequence"], dims["sequence"]):
            names = names | {"batch": SEQUENCES, "sequence": TIME_AXES}
    spec = []
    for dim, axis in zip(shape, axes, strict=True):
        kept: tuple[str, ...] = ()
        for name in names[axis]:
            if name in sizes and divide((*kept, name), dim):
                kept += (name,)
        spec.append(entry_of(kept))
    return P(*spec)


def split_dim(spec: P, whole: P) -> int | None:
    """The first dim that spec splits in another way than whole, of tokens: where `tensor` splits them."""
    return next((dim for dim, (one, other) in enumerate(zip(spec, whole, strict=False)) if one != other), None)


def rows_spec(*axes: str | None) -> P:
    """PartitionSpec of rows of tokens sent to experts: [rows, *dims], the rows of all devices concatenated, with the
    logical axes of the other dims."""
    free = free_axes()
    parts = (ACTIVATION_AXES[axis] for axis in ("rows", *axes))
    return P(*(entry_of(tuple(name for name in names if name in free)) for names in parts))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains x to the sharding that the table gives for these logical axes, one per dim."""
    if not has_mesh():
        return x
    return jax.lax.with_sharding_constraint(x, activation_spec(x.shape, axes))


def between_blocks(y_BTD: jax.Array) -> jax.Array:
    """A product that is summed over `tensor`, sharded like the residual stream.

    The sums themselves are constrained, too. Without that, XLA (jaxlib 0.11.2) scatters them only as parts of
    sequences, and, of a single sequence, gathers the gradient for each of the two products that read it.
    """
    return constrain(constrain(y_BTD, "batch", "time", None), "batch", "sequence", None)


def replicated(tree):
    """The arrays on every device, so that every process can read them."""
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, P()), tree)


def one_value(x: jax.Array) -> jax.Array:
    """x, which XLA may shard as it likes, but which its passes before the partitioner do not make several copies of:
    each copy would be gathered by itself (gpt_175b, jaxlib 0.10.2: a matrix twice in the backward pass)."""
    return jax.lax.with_sharding_constraint(x, P(*[P.UNCONSTRAINED] * x.ndim)) if has_mesh() and free_axes() else x


def constrain_weights(tree, records):
    """Constrains arrays to the shardings of parameters with these records."""
    if not has_mesh():
        return tree
    free = free_axes()

    def constrain_leaf(record, x):
        return jax.lax.with_sharding_constraint(x, _local(split_by(record.axes, record.num_experts, free), free))

    return jax.tree.map(constrain_leaf, records, tree)
