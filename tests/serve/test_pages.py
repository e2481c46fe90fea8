"""The page pool: sharing by content, secrets, eviction."""

import pytest

from fdel.serve.engine.pages import Pool

TOKENS = list(range(100, 120))


def fill(pool: Pool, tokens: list[int], salt: bytes = b"a") -> list[int]:
    """Own pages for tokens and publish the full ones."""
    pages, digests = pool.match(tokens, salt)
    pages += pool.take(pool.needed(len(tokens)) - len(pages))
    for i in range(len(digests), len(tokens) // pool.size):
        part = tokens[i * pool.size : (i + 1) * pool.size]
        digests.append(pool.publish(pages[i], part, digests[-1] if i else salt, first=i == 0))
    return pages


def test_full_pages_are_shared_and_the_last_token_is_computed() -> None:
    pool = Pool(10, 4)
    first = fill(pool, TOKENS[:10])
    assert pool.match(TOKENS[:10], b"a")[0] == first[:2]
    assert pool.match(TOKENS[:9], b"a")[0] == first[:2]
    assert pool.match(TOKENS[:8], b"a")[0] == first[:1]  # the second page would leave no token to compute
    assert pool.match([*TOKENS[:7], 1, 2, 3], b"a")[0] == first[:1]
    assert pool.match(TOKENS[1:10], b"a")[0] == []
    assert [pool.owners[p] for p in first] == [5, 3, 1]


def test_another_salt_or_pool_finds_nothing() -> None:
    pool = Pool(10, 4)
    fill(pool, TOKENS[:9])
    assert pool.match(TOKENS[:9], b"b") == ([], [])
    assert Pool(1, 4).digest(b"a", b"b", first=True) != Pool(1, 4).digest(b"a", b"b", first=True)
    assert pool.digest(b"a", b"bc", first=True) != pool.digest(b"a", b"bc", first=False)


def test_a_digest_is_not_believed() -> None:
    """Two contents with one digest: the tokens are compared."""
    pool = Pool(10, 4)
    pool.digest = lambda *a, **k: b"same"
    fill(pool, TOKENS[:4])
    assert pool.match([*TOKENS[:4], 9], b"a")[0] and not pool.match([1, 2, 3, 4, 9], b"a")[0]


def test_the_longest_unused_is_evicted_and_ends_before_beginnings() -> None:
    pool = Pool(6, 4)
    old, new = fill(pool, TOKENS[:12]), fill(pool, TOKENS[5:17])
    pool.release(old)
    pool.release(new)
    assert pool.available == 6 and list(pool.idle) == [*old[::-1], *new[::-1]]
    pool.match(TOKENS[:5], b"a")  # uses the first page of the old one
    taken = pool.take(4)
    assert taken == [old[2], old[1], new[2], new[1]]
    assert pool.match(TOKENS[:12], b"a")[0] == old[:1] and pool.match(TOKENS[5:17], b"a")[0] == new[:1]
    with pytest.raises(ValueError, match="1 pages wanted, 0 of 6 available"):
        pool.take(1)


def test_the_same_content_twice_keeps_the_first() -> None:
    pool = Pool(4, 4)
    a, b = pool.take(1), pool.take(1)
    assert pool.publish(a[0], TOKENS[:4], b"a", first=True) == pool.publish(b[0], TOKENS[:4], b"a", first=True)
    pool.release(b)
    assert b[0] in pool.free and pool.match(TOKENS[:5], b"a")[0] == a


def test_forget_and_no_cache() -> None:
    pool = Pool(6, 4)
    held, gone = fill(pool, TOKENS[:9]), fill(pool, TOKENS[9:18])
    pool.release(gone)
    pool.forget()
    assert pool.match(TOKENS[:9], b"a") == ([], []) and pool.available == 3
    pool.release(held)
    assert sorted(pool.free) == list(range(6))
    off = Pool(6, 4, cache=False)
    fill(off, TOKENS[:9])
    assert off.match(TOKENS[:9], b"a") == ([], [])
