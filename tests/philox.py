"""Philox on Python integers."""

WORD = 2**32 - 1


def plain_philox(counter, key_words, rounds=10, multipliers=(0xD2511F53, 0xCD9E8D57)):
    """Return Philox 4x32 on Python integers, written from the paper."""
    c0, c1, c2, c3 = counter
    k0, k1 = key_words
    for _ in range(rounds):
        p0, p1 = multipliers[0] * c0, multipliers[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & WORD, (p0 >> 32) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3
