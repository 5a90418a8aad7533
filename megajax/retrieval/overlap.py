"""How much of a text a neighbour gives away: the share of its 13-grams that occur in it.

Most of what RETRO gains comes from tokens that the neighbours and the text share (Norlund et al. 2023,
https://arxiv.org/abs/2302.12128), so a loss is to be read beside this share.
"""

import jax
import jax.numpy as jnp

from megajax.retrieval.inputs import NO_TOKEN

GRAM = 13


@jax.jit
def overlaps(text_BT: jax.Array, neighbours_BKR: jax.Array) -> jax.Array:
    """Tokens int32, NO_TOKEN for padding -> float32 [B, K]: the share of the 13-grams of each text that occur in each
    of its neighbours; 0 for a text without any. 13-grams are compared by hashes of 32 bits."""
    text_BG, exists_BG = _grams(text_BT)
    grams_BKH, known_BKH = _grams(neighbours_BKR)

    def compare(occurs_BKG, gram):
        gram_BK, known_BK = gram
        return occurs_BKG | ((text_BG[:, None] == gram_BK[..., None]) & known_BK[..., None]), None

    # a loop over H, and not an array [B, K, G, H], which XLA reduces 30 times more slowly on a CPU
    start = jnp.zeros((*neighbours_BKR.shape[:2], text_BG.shape[1]), bool)
    occurs_BKG, _ = jax.lax.scan(compare, start, (jnp.moveaxis(grams_BKH, 2, 0), jnp.moveaxis(known_BKH, 2, 0)))
    occurs_BKG &= exists_BG[:, None]
    return jnp.sum(occurs_BKG, axis=2) / jnp.maximum(jnp.sum(exists_BG, axis=1, keepdims=True), 1)


def _grams(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., T] -> (hashes uint32, whether no token is padding) [..., T - GRAM + 1]."""
    count = max(tokens.shape[-1] - GRAM + 1, 0)
    hashes = jnp.zeros((*tokens.shape[:-1], count), jnp.uint32)
    exists = jnp.ones(hashes.shape, bool)
    for place in range(GRAM):
        part = tokens[..., place : place + count]
        hashes = (hashes ^ part.astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
        hashes ^= hashes >> 15
        exists &= part != NO_TOKEN
    return hashes, exists
