"""Sums and concatenations of arrays of all GPUs of a host, each in one kernel, which may be in any CUDA graph.

Each GPU has a mailbox, memory into which the others write. NCCL's and XLA's own kernels (jaxlib 0.11.2) cannot be in a
graph with a loop, and XLA's are launched by the host between other kernels.

Of a small array each GPU writes each 4 bytes into every other mailbox, with the number of the round beside them, so
that a thread that reads a pair knows whether it has come (NCCL's "LL" protocol): one way over NVLink. A mailbox has two
places for them, used in turn, so a GPU that is ahead never overwrites what another one still reads.

Of a larger one it writes where the array and the result are, and each block waits until the same block of the others
has done so. To gather, it then reads its part of all arrays over NVLink. To sum, each GPU has a part of the vectors: it
reads them from all arrays and writes the sums into the results of all (as the "two-shot" all-reduces of other
libraries), so 2 (N - 1) / N of the array are sent. At the end each block waits until the others have read and written
theirs, since what comes next may overwrite the array. All arrays have to be in memory that all GPUs reach.

All GPUs have to run the same kernels with the same shapes in the same order, one at a time, and to start the first of a
program when each has all of it: one that waits, and another one that cannot start before, would wait for ever. After a
minute of waiting a kernel fails.

Dimensions: N GPUs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf

MOST_BLOCKS = 128  # each has its own counts of rounds, flags and addresses, so not all have to take part
THREADS = 128
VECTOR_BYTES = 16
FLAG_BYTES = 4
ADDRESS_BYTES = 8
PLACES_BYTES = 2 * ADDRESS_BYTES  # of an array and the result
MOST_WAITING = 15  # times 4.3 s

FEW_VECTORS = MOST_BLOCKS * THREADS  # of a small array: one of a thread
FEW_SLOT_BYTES = FEW_VECTORS * 2 * VECTOR_BYTES

MOST_LOADS = 16  # of a thread, in flight: of a larger array, from all GPUs together


class _Layout:
    """Of a mailbox: where its parts begin, in bytes, and its size."""

    def __init__(self, num_gpus: int):
        self.few_slots = 0
        self.addresses = self.few_slots + 2 * num_gpus * FEW_SLOT_BYTES
        self.began = self.addresses + num_gpus * MOST_BLOCKS * PLACES_BYTES
        self.ended = self.began + num_gpus * MOST_BLOCKS * FLAG_BYTES
        self.count = self.ended + num_gpus * MOST_BLOCKS * FLAG_BYTES
        self.few_count = self.count + MOST_BLOCKS * FLAG_BYTES
        self.size = self.few_count + MOST_BLOCKS * FLAG_BYTES


def mailbox_bytes(num_gpus: int) -> int:
    """Of each GPU. It has to be zero at first, and nothing else may write to it."""
    return _Layout(num_gpus).size


def in_words(addresses: Sequence[int]) -> np.ndarray:
    """uint32 [N, 2] of the addresses of the mailboxes, in the order of the GPUs, as the kernels take them."""
    return np.array([(address & 0xFFFFFFFF, address >> 32) for address in addresses], np.uint32)


def is_exchanged(shape: Sequence[int], dtype: jnp.dtype) -> bool:
    """Whether these kernels take an array: its last dim has to be whole vectors."""
    return shape[-1] * jnp.dtype(dtype).itemsize % VECTOR_BYTES == 0


def all_reduce(x: jax.Array, rank: jax.Array, addresses: jax.Array) -> jax.Array:
    """The sum of the x of all GPUs, bfloat16, added in float32 in the order of the GPUs, so the same on each.

    rank: uint32 scalar, the number of this GPU. addresses: uint32 [N, 2], `in_words`.
    """
    if x.dtype != jnp.bfloat16:
        raise ValueError(f"x is {x.dtype}; sums are of bfloat16")
    return _exchanged(x, rank, addresses, x.shape, _store_sum, shares=True)


def all_gather(x: jax.Array, rank: jax.Array, addresses: jax.Array) -> jax.Array:
    """The x of all GPUs side by side: [..., K] -> [..., N K]."""
    row_vectors = x.shape[-1] * x.dtype.itemsize // VECTOR_BYTES
    shape = (*x.shape[:-1], x.shape[-1] * addresses.shape[0])
    return _exchanged(x, rank, addresses, shape, functools.partial(_store_all, row_vectors), shares=False)


def _exchanged(
    x: jax.Array, rank: jax.Array, addresses: jax.Array, shape: tuple[int, ...], store: Callable, *, shares: bool
) -> jax.Array:  # fmt: skip
    """shape: of the result. store: `_store_sum` or the like. shares: of a large array, each GPU computes a part of the
    result of all."""
    if not is_exchanged(x.shape, x.dtype):
        raise ValueError(f"x {x.dtype}{x.shape}: the last dim has to be a multiple of {VECTOR_BYTES} bytes")
    num_vectors = x.size * x.dtype.itemsize // VECTOR_BYTES
    if num_vectors <= FEW_VECTORS:
        blocks = -(-num_vectors // THREADS)
        exchange = functools.partial(_exchange_few, addresses.shape[0], num_vectors, store)
    else:
        blocks = MOST_BLOCKS
        exchange = functools.partial(_exchange, addresses.shape[0], num_vectors, blocks, store, shares)

    def body(x_ref, table_ref, out_ref):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)(exchange)(x_ref, table_ref, out_ref)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, x.dtype),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(x, jnp.concatenate([rank[None], addresses[rank], addresses.reshape(-1)]))


# ---------------------------------------------------------------------- what a thread does, in MLIR


class _Given:
    """To each thread: its number and that of its block, addresses, and the number of this GPU, all 64 bits wide."""

    def __init__(self, num_gpus: int, refs: Sequence[Any]):
        self.thread = _wide(gpu.thread_id(gpu.Dimension.x))
        self.block = _wide(gpu.block_id(gpu.Dimension.x))
        self.x, self.table, self.out = (llvm.ptrtoint(_i64(), utils.memref_ptr(ref)) for ref in refs)
        self.rank = arith.extui(_i64(), _loaded(_i32(), self.table))
        self.own = self.mailbox(_number(-1))
        self.mailboxes = [self.mailbox(_number(number)) for number in range(num_gpus)]

    def mailbox(self, number):
        """Of a GPU, -1: of this one. The table has the number of this GPU, and two words of each address."""
        words = _sum(self.table, _number(12), arith.muli(number, _number(8)))
        low, high = (arith.extui(_i64(), _loaded(_i32(), _sum(words, _number(4 * half)))) for half in range(2))
        return arith.ori(low, arith.shli(high, _number(32)))


def _exchange_few(num_gpus: int, num_vectors: int, store: Callable, _, *refs) -> None:
    layout = _Layout(num_gpus)
    given = _Given(num_gpus, refs)
    thread = given.thread
    count = _sum(given.own, _number(layout.few_count), arith.muli(given.block, _number(FLAG_BYTES)))
    epoch = _sum(_loaded(_i32(), count), _number(1, _i32()))
    # Never 0, which is in places that nothing was written to; 2 has the same slot.
    is_zero = arith.cmpi(arith.CmpIPredicate.eq, epoch, _number(0, _i32()))
    epoch = arith.select(is_zero, _number(2, _i32()), epoch)
    # The last vector takes the place of those beyond the end.
    vector = arith.minui(_sum(arith.muli(given.block, _number(THREADS)), thread), _number(num_vectors - 1))
    value = _loaded(_vector(), _sum(given.x, arith.muli(vector, _number(VECTOR_BYTES))), VECTOR_BYTES)
    turn = arith.muli(arith.extui(_i64(), arith.andi(epoch, _number(1, _i32()))), _number(num_gpus * FEW_SLOT_BYTES))
    place = _sum(_number(layout.few_slots), turn, arith.muli(vector, _number(2 * VECTOR_BYTES)))

    words = [llvm.extractelement(value, _number(number, _i32())) for number in range(4)]
    for mailbox in given.mailboxes:
        slot = _sum(mailbox, place, arith.muli(given.rank, _number(FEW_SLOT_BYTES)))
        _store_pairs(slot, words[:2], epoch)
        _store_pairs(_sum(slot, _number(VECTOR_BYTES)), words[2:], epoch)
    gpu.barrier()  # all threads have the count
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, thread, _number(0))):
        llvm.store(epoch, _at(count), alignment=FLAG_BYTES)

    def read() -> tuple[Any, list]:
        found = []
        is_missing = _number(0, ir.IntegerType.get_signless(1))
        for number in range(2 * num_gpus):
            start = number // 2 * FEW_SLOT_BYTES + number % 2 * VECTOR_BYTES
            *pair, one, other = _loaded_pairs(_sum(given.own, place, _number(start)))
            found += pair
            for flag in (one, other):
                is_missing = arith.ori(is_missing, arith.cmpi(arith.CmpIPredicate.ne, flag, epoch))
        return is_missing, found

    found = _wait_while(read, [_i32()] * (4 * num_gpus))
    store([given.out], vector, [_joined(found[4 * number : 4 * number + 4]) for number in range(num_gpus)])


def _exchange(num_gpus: int, num_vectors: int, blocks: int, store: Callable, shares: bool, _, *refs) -> None:
    layout = _Layout(num_gpus)
    given = _Given(num_gpus, refs)
    thread = given.thread
    block = given.block
    rank = given.rank
    of_block = arith.muli(block, _number(FLAG_BYTES))
    count = _sum(given.own, _number(layout.count), of_block)
    epoch = _sum(_loaded(_i32(), count), _number(1, _i32()))
    # A thread for each of the others.
    is_one = arith.cmpi(arith.CmpIPredicate.ult, thread, _number(num_gpus))
    is_one = arith.andi(is_one, arith.cmpi(arith.CmpIPredicate.ne, thread, rank))
    by_rank = _sum(arith.muli(rank, _number(MOST_BLOCKS)), block)
    by_thread = _sum(arith.muli(thread, _number(MOST_BLOCKS)), block)

    def meet(flags: int) -> None:
        """Returns when this block of all GPUs has come here."""
        here, there = (_sum(_number(flags), arith.muli(by, _number(FLAG_BYTES))) for by in (by_thread, by_rank))
        _set_flag(_sum(given.mailbox(thread), there), epoch)
        _wait_for(_sum(given.own, here), epoch)

    with mgpu.when(is_one):
        place = _sum(_number(layout.addresses), arith.muli(by_rank, _number(PLACES_BYTES)))
        for number, address in enumerate((given.x, given.out)):
            there = _sum(given.mailbox(thread), place, _number(number * ADDRESS_BYTES))
            llvm.store(address, _at(there), alignment=ADDRESS_BYTES)
        meet(layout.began)
    gpu.barrier()

    def of_all(own, start: int) -> list:
        """The addresses of all GPUs, of which this one's is its own; the others are `start` bytes after each place."""
        found = []
        for number in range(num_gpus):
            of_gpu = _number(layout.addresses + number * MOST_BLOCKS * PLACES_BYTES + start)
            place = _sum(given.own, of_gpu, arith.muli(block, _number(PLACES_BYTES)))
            is_own = arith.cmpi(arith.CmpIPredicate.eq, rank, _number(number))
            found.append(arith.select(is_own, own, _loaded(_i64(), place, ADDRESS_BYTES)))
        return found

    sources = of_all(given.x, 0)
    results = of_all(given.out, ADDRESS_BYTES) if shares else [given.out]
    gpu_vectors = -(-num_vectors // num_gpus) if shares else num_vectors
    first = arith.muli(rank, _number(gpu_vectors)) if shares else _number(0)
    end = arith.minui(_sum(first, _number(gpu_vectors)), _number(num_vectors))
    block_vectors = -(-gpu_vectors // blocks)
    first = _sum(first, arith.muli(block, _number(block_vectors)))
    end = arith.minui(_sum(first, _number(block_vectors)), end)
    unrolled = max(min(-(-block_vectors // THREADS), MOST_LOADS // num_gpus), 1)
    with _loop(_sum(first, thread), end, THREADS * unrolled) as vector:
        places = [_sum(vector, _number(THREADS * number)) for number in range(unrolled)]
        # The last vector takes the place of those beyond the end.
        places = [arith.minui(place, arith.subi(end, _number(1))) for place in places]
        offsets = [arith.muli(place, _number(VECTOR_BYTES)) for place in places]
        loaded = [[_loaded(_vector(), _sum(source, offset), VECTOR_BYTES) for source in sources] for offset in offsets]
        for place, values in zip(places, loaded, strict=True):
            store(results, place, values)

    gpu.barrier()
    with mgpu.when(is_one):
        meet(layout.ended)
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, thread, _number(0))):
        llvm.store(epoch, _at(count), alignment=FLAG_BYTES)


def _store_sum(results: list, vector, values) -> None:
    elements = VECTOR_BYTES // 2
    narrow = ir.VectorType.get([elements], ir.BF16Type.get())
    wide = ir.VectorType.get([elements], ir.F32Type.get())
    terms = [arith.extf(wide, llvm.bitcast(narrow, value)) for value in values]
    total = arith.truncf(narrow, functools.reduce(arith.addf, terms))
    for result in results:
        _store(llvm.bitcast(_vector(), total), _sum(result, arith.muli(vector, _number(VECTOR_BYTES))))


def _store_all(row_vectors: int, results: list, vector, values) -> None:
    (result,) = results
    row = arith.divui(vector, _number(row_vectors))
    before = arith.muli(row, _number(row_vectors * (len(values) - 1)))  # rows of the others
    for number, value in enumerate(values):
        place = _sum(vector, before, _number(number * row_vectors))
        _store(value, _sum(result, arith.muli(place, _number(VECTOR_BYTES))))


def _set_flag(address, epoch) -> None:
    """After all that the block has read and written."""
    _assembly("st.release.sys.global.u32 [$0], $1;", "l,r,~{memory}", [address, epoch])


def _wait_for(address, epoch) -> None:
    """Until the flag is that of this round, or of the next one."""

    def read() -> tuple[Any, list]:
        flag = _assembly("ld.acquire.sys.global.u32 $0, [$1];", "=r,l,~{memory}", [address], _i32())
        return arith.cmpi(arith.CmpIPredicate.slt, arith.subi(flag, epoch), _number(0, _i32())), []

    _wait_while(read, [])


def _wait_while(read: Callable[[], tuple[Any, list]], kinds: list) -> list:
    """Calls read -> (whether to call it again, values of these kinds) until it has what was waited for: the values."""
    start = _time()
    loop = scf.WhileOp(kinds, [])
    with ir.InsertionPoint(loop.before.blocks.append()):
        again, values = read()
        scf.condition(again, values)
    with ir.InsertionPoint(loop.after.blocks.append(*kinds)):
        waited = arith.subi(_time(), start)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ugt, waited, _number(MOST_WAITING, _i32()))):
            _assembly("trap;", "", [])
        scf.yield_([])
    return list(loop.results)


def _store_pairs(address, words: list, epoch) -> None:
    """Two words, each with the number of the round beside it: both of a pair arrive at once."""
    _assembly("st.volatile.global.v4.u32 [$0], {$1, $3, $2, $3};", "l,r,r,r,~{memory}", [address, *words, epoch])


def _loaded_pairs(address) -> list:
    """-> two words, and the numbers beside them."""
    kind = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
    text = "ld.volatile.global.v4.u32 {$0, $1, $2, $3}, [$4];"
    found = _assembly(text, "=r,=r,=r,=r,l,~{memory}", [address], kind)
    return [llvm.extractvalue(_i32(), found, [number]) for number in (0, 2, 1, 3)]


def _joined(words: list):
    vector = llvm.mlir_undef(_vector())
    for number, word in enumerate(words):
        vector = llvm.insertelement(vector, word, _number(number, _i32()))
    return vector


def _time():
    """In units of 2^32 ns."""
    return _assembly("mov.u32 $0, %globaltimer_hi;", "=r", [], _i32())


class _loop:
    """`with _loop(first, end, step) as number:` -> scf.for."""

    def __init__(self, first, end, step: int):
        self._op = scf.ForOp(first, end, _number(step))

    def __enter__(self):
        self._point = ir.InsertionPoint(self._op.body)
        self._point.__enter__()
        return self._op.induction_variable

    def __exit__(self, *error):
        scf.yield_([])
        self._point.__exit__(*error)


def _assembly(text: str, constraints: str, operands: list, result=None) -> Any:
    return llvm.inline_asm(result, operands, text, constraints, has_side_effects=True, asm_dialect=0)


def _loaded(kind, address, alignment: int = 4):
    return llvm.load(kind, _at(address), alignment=alignment)


def _store(value, address) -> None:
    llvm.store(value, _at(address), alignment=VECTOR_BYTES)


def _at(address):
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), address)


def _wide(index):
    return arith.extui(_i64(), arith.index_cast(_i32(), index))


def _number(value: int, kind=None) -> Any:
    return mgpu.c(value, _i64() if kind is None else kind)


def _sum(*terms):
    return functools.reduce(arith.addi, terms)


def _vector():
    return ir.VectorType.get([VECTOR_BYTES // 4], _i32())


def _i32():
    return ir.IntegerType.get_signless(32)


def _i64():
    return ir.IntegerType.get_signless(64)
