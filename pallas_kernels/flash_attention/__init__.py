"""Attention without a T x S matrix of scores, forward and backward, for Hopper (Pallas, Mosaic GPU).

FlashAttention-2 (Dao 2023, arXiv 2307.08691) with the warp specialisation of FlashAttention-3 (Shah et al. 2024, arXiv
2407.08608). With s_ij = scale q_i k_j, or cap tanh(scale q_i k_j / cap):

    forward     lse_i = log sum_j exp(s_ij),  p_ij = exp(s_ij - lse_i),  o_i = sum_j p_ij v_j
    backward    delta_i = d_o_i o_i,  d_s_ij = p_ij (d_o_i v_j - delta_i),
                d_v_j = sum_i p_ij d_o_i,  d_q_i = scale sum_j d_s_ij k_j,  d_k_j = scale sum_i d_s_ij q_i

Every mask is an interval: query i attends to the keys lower_i <= j < upper_i, and both bounds never decrease along the
sequence. Causal: [0, i + 1). A window of w: [i + 1 - w, i + 1). Packed documents: from the first token of the query's
document. Not causal: [0, S). Fully masked tiles are skipped, and only partly masked ones apply a mask.

Dimensions: B batch, T query time, S key time, N heads, K key-value heads, G = N / K, H head dim.
bfloat16 or float16, sums and softmax float32. T and S need not be multiples of a tile: TMA reads zeros beyond the end
and drops writes there; only if they are not multiples of 8 are the arrays copied first. The kernel is persistent: one
block per multiprocessor processes tile after tile (schedule.py). It has one warpgroup that loads, including the next
tile, and two that compute, 64 rows each:

    forward     a tile is 128 queries of a head; it loops over keys and values, 128 at a time, two in flight; one
                warpgroup multiplies while the other computes its softmax. Shared memory: 192 KB for H = 128.
    backward    a tile is 128 keys of a key-value head; it loops over the queries of its G heads, 64 at a time. d_k and
                d_v stay in registers; d_q is accumulated in float32 by TMA, in no fixed order, so the last bits of d_q
                may differ from run to run, unless `ordered` fixes the order. Shared memory: 194 KB for H = 128.
                Heads of 80 (not used yet: README.md): rows of 160 bytes have a swizzle of 32, and of the columns
                of d_q one warpgroup computes the first 48 and the other the last 48, which is 1.04 times the products;
                127 KB forward, 162 KB backward.
                Heads of 256: d_k and d_v of 64 keys fill the registers of both warpgroups, so a tile has 64 keys, each
                warpgroup computes all p and d_s, and half of the columns of d_q, d_k and d_v: 1.4 times the products.

Refused: see `problem`.
"""

from pallas_kernels.flash_attention.backward import backward, joined_backward
from pallas_kernels.flash_attention.forward import forward, joined_forward
from pallas_kernels.flash_attention.tiles import HEAD_DIMS, problem

__all__ = ["HEAD_DIMS", "backward", "forward", "joined_backward", "joined_forward", "problem"]
