"""A seeded permutation of n indices without a table: a Feistel network, applied until its value is in range (Black and
Rogaway, Ciphers with Arbitrary Finite Domains, 2002)."""

import struct

import xxhash

ROUNDS = 8


def permuted(index: int, n: int, *key: int) -> int:
    """Return the image of an index under a permutation of 0 .. n - 1, which depends on `key`, integers >= 0."""
    half = max((n - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    seed = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(key)}Q", *key))
    while True:
        left, right = index >> half, index & mask
        for number in range(ROUNDS):
            mixed = xxhash.xxh3_64_intdigest(struct.pack("<QQ", right, number), seed)
            left, right = right, left ^ (mixed & mask)
        index = left << half | right
        if index < n:
            return index
