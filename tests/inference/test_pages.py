"""The pool of pages: who uses a page, and which beginnings are known."""

from megajax.inference.pages import PagePool


def test_a_known_beginning_is_found_up_to_the_last_whole_page_before_the_end():
    pool = PagePool(8, 2)
    pages = pool.allocate(3)
    pool.register([1, 2, 3, 4, 5], pages)
    assert pool.match([1, 2, 3, 4, 9]) == pages[:2]
    assert pool.match([1, 2, 3, 4]) == pages[:1]  # the last token is computed again
    assert pool.match([3, 4, 1]) == []  # a page depends on what comes before it
    pool.release(pages)
    assert pool.num_used == 2
    pool.release(pages[:2])
    pool.release(pages[:1])
    assert pool.num_used == 0


def test_least_recently_used_pages_go_first_and_ends_before_beginnings():
    pool = PagePool(4, 1)
    old, new = pool.allocate(2), pool.allocate(2)
    pool.register([1, 2], old)
    pool.register([3, 4], new)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.allocate(1) == [old[0]]
    assert pool.match([3, 4, 5]) == new
    assert pool.allocate(1) is None
    pool.release(new)
    pool.forget()
    assert pool.match([3, 4, 5]) == [] and pool.num_free == 2
