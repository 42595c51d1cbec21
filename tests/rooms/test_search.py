"""The search for a size, told of updates that nobody makes."""

import pytest

from macrobatch._sizes.paying import Paying
from macrobatch._sizes.search import Search


def run(search, seconds, batch=512, most=None, extent=1.0, peak=None, batches=200):
    """Runs batches until the search has settled. Returns the sizes that were run."""
    sizes = []
    for _ in range(batches):
        search.meet(batch, extent)
        size = search.to_rehearse()
        while size is not None:
            search.rehearsed(size, peak(size))
            size = search.to_rehearse()
        size = search.next()
        sizes.append(size)
        while most is not None and size > most:
            assert search.ran_out()
            size = search.next()
            sizes.append(size)
        search.ran(batch, seconds(size))
        if search.is_settled:
            break
    return sizes


@pytest.mark.parametrize("best", [1, 8, 64, 512])
def test_finds_the_fastest(best):
    search = Search()
    run(search, lambda size: max(size / best, best / size) ** 0.3)
    assert search.is_settled
    assert search.size == best


def test_starts_with_the_whole_batch_and_halves_what_runs_out():
    search = Search(looks=False)
    assert run(search, lambda size: 1.0, batch=96, most=20) == [96, 64, 32, 16]
    assert search.is_settled
    assert search.size == 16


@pytest.mark.parametrize(
    ("best", "looked_at"),
    [
        (512, {512, 256}),
        (1024, {512, 256}),
        (128, {512, 256, 128, 64}),
        (1, {2**i for i in range(10)}),
    ],
)
def test_looks_at_few_sizes_where_each_is_compiled(best, looked_at):
    search = Search(is_compiled=True)
    sizes = run(search, lambda size: max(size / best, best / size) ** 0.3)
    assert search.is_settled
    assert search.size == min(best, 512)
    assert set(sizes) == looked_at


def test_sizes_that_are_as_fast_need_not_be_compiled():
    assert set(run(Search(is_compiled=True), lambda size: 1.0)) == {512, 256}


def test_sizes_that_are_compiled_are_powers_of_two():
    search = Search(is_compiled=True)
    assert set(run(search, lambda size: size, batch=60)) == {1, 2, 4, 8, 16, 32, 64}
    search = Search(is_compiled=True)
    assert run(search, lambda size: 1.0, batch=60, most=50, batches=1) == [64, 32]
    search = Search(is_compiled=True)
    search.meet(60, 1.0)
    search.next()
    search.ran(60, 1.0)
    for _ in range(9):  # of another shape, which is compiled for itself
        search.ran(40, 1.0)
    assert not search._seconds


def test_does_not_look_where_the_size_shows():
    search = Search(looks=False)
    assert run(search, lambda size: 1.0 / size) == [512]


def test_stops_looking_in_the_middle():
    search = Search()
    sizes = run(search, lambda size: 1.0, most=100, batches=5)
    assert search.times
    assert search.best() == 64 != search.size
    search.only_fits()
    assert search.is_settled
    assert search.size == search.next() == max(size for size in sizes if size < 100) == 64


def test_first_update_of_a_size_is_not_timed():
    calls = []

    def seconds(size):
        calls.append(size)
        return 100.0 if calls.count(size) == 1 else 512 / size

    search = Search()
    run(search, seconds)
    assert search.size == 512
    assert max(map(max, search._seconds.values())) < 100 / 512


def test_ties_go_to_the_smaller_size_and_end():
    search = Search()
    sizes = run(search, lambda size: 1.0 if size >= 64 else 2.0)
    assert search.size == 64
    assert len(sizes) < 50


def test_small_batches_are_not_timed():
    search = Search()
    search.meet(512, 1.0)
    search.next()
    search.ran(512, 1.0)
    for _ in range(30):
        search.meet(100, 1.0)
        search.next()
        search.ran(100, 1.0)
    assert not search.is_settled
    assert search.size == 512


def test_interleaves():
    search = Search()
    sizes = run(search, lambda size: 1.0 if size >= 128 else 3.0)
    turns = sizes[-6:]
    assert len(set(turns)) > 1
    assert all(a != b for a, b in zip(turns, turns[1:]))


def test_a_larger_batch_later_runs_out_again():
    search = Search(looks=False)
    run(search, lambda size: 1.0, batch=64)
    assert search.size == 64
    assert run(search, lambda size: 1.0, batch=256, most=100) == [256, 128, 64]


def test_nothing_smaller_than_one():
    search = Search()
    search.meet(4, 1.0)
    assert [search.next(), search.ran_out()] == [4, True]
    assert [search.next(), search.ran_out()] == [2, True]
    assert [search.next(), search.ran_out()] == [1, False]


@pytest.mark.parametrize("first", [None, 4])
def test_after_a_batch_of_which_nothing_fits_it_starts_anew(first):
    search = Search(first=first)
    search.meet(4, 600.0)
    search.next()
    while search.ran_out():
        search.next()
    search.meet(2, 1.0)
    assert search.next() == 2
    search.ran(2)
    search.meet(8, 1.0)
    assert search.next() == (first or 8)


def test_runs_out_while_it_looks():
    search = Search()
    run(search, lambda size: 1 / size, batches=3)
    search.meet(512, 1.0)
    assert search.next() == 256
    assert search.ran_out()
    assert search.next() == 128
    run(search, lambda size: 1 / size, batch=512)
    assert search.size == 128


def test_settled_and_then_run_out():
    search = Search()
    run(search, lambda size: 1 / size)
    assert search.size == 512
    search.next()
    assert search.ran_out()
    assert search.next() == 256
    assert search.is_settled


@pytest.mark.parametrize("limit", [130, 200, 300, 600, 10_000])
def test_rehearses_no_more_than_the_line_says(limit):
    rehearsed = []

    def peak(size):
        rehearsed.append(size)
        return 100 + size

    search = Search(limit=limit, looks=False)
    run(search, lambda size: 1.0, peak=peak)
    assert all(100 + size <= limit for size in rehearsed)
    assert rehearsed == sorted(rehearsed)
    assert search.size <= limit - 100
    assert search.size == 512 or 2 * search.size > 0.95 * limit - 100


def test_what_an_update_takes_beyond_its_rehearsal_counts():
    search = Search(limit=300, looks=False)
    run(search, lambda size: 1.0, peak=lambda size: 100 + size)
    assert search.size == 128
    search.takes_beyond(100)
    assert search.next() == 64


@pytest.mark.parametrize(("power", "expected"), [(2, 32), (1, 64)])
def test_longer_examples_shrink_the_size(power, expected):
    search = Search(limit=300, looks=False, power=power)
    run(search, lambda size: 1.0, peak=lambda size: 100 + size)
    assert search.size == 128
    run(search, lambda size: 1.0, extent=2.0, peak=lambda size: 100 + size * 2**power)
    assert search.size == expected


def test_what_was_found_before_is_taken_at_once():
    search = Search(limit=1000, first=32)
    assert run(search, lambda size: 1.0, peak=pytest.fail) == [32]
    assert search.is_settled
    search = Search(first=32)
    assert run(search, lambda size: 1.0, most=10) == [32, 16, 8]


def test_it_settles_with_the_fastest_size_so_far():
    search = Search()
    search.meet(8, 1.0)
    for seconds in (9.0, 8.0, 9.0, 4.0, 9.0, 5.0):  # of each size the second one counts
        search.next()
        search.ran(8, seconds)
    search.settle()
    assert search.is_settled
    assert search.next() == 4
    assert search.found() == "the fastest of 2, 4, 8"


def test_it_settles_with_the_size_that_fits_if_no_other_was_timed():
    search = Search()
    search.meet(8, 1.0)
    for seconds in (9.0, 8.0):
        search.next()
        search.ran(8, seconds)
    search.settle()
    assert search.next() == 8
    assert search.found() == "all at once"


@pytest.mark.parametrize(("updates", "pays"), [(None, False), (40, False), (1000, True)])
def test_a_size_must_save_more_than_it_takes_to_compile(updates, pays):
    paying = Paying()
    paying.expect(updates)
    paying(True, 10.0)
    assert paying(False, 1.0) is pays  # of which it might save a tenth


def test_it_stops_paying_when_little_is_left():
    paying = Paying()
    paying.expect(104)
    found = [paying(number == 0, 10.0 if number == 0 else 1.0) for number in range(8)]
    assert found == [True, True, True, False, False, False, False, False]
