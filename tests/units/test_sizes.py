"""Sizes, by arithmetic alone: the search for one, on a machine that a test makes up; the line
through peaks; and the files that keep sizes, from several processes.
"""

import multiprocessing
import random
import sys

import pytest

from macrobatch._sizes import cache
from macrobatch._sizes.peaks import highest_ever, line_through
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


def fastest_at(best):
    return lambda size: max(size / best, best / size) ** 0.3


ALL = {2**power for power in range(10)}


@pytest.mark.parametrize(
    ("is_compiled", "best", "looked_at"),
    [
        *((False, best, ALL) for best in (1, 8, 64)),
        (False, 512, {512, 256, 128, 64}),
        (True, 512, {512, 256}),  # of compiled sizes, few
        (True, 1024, {512, 256}),
        (True, 128, {512, 256, 128, 64}),
        (True, 1, ALL),
    ],
)
def test_finds_the_fastest(is_compiled, best, looked_at):
    search = Search(is_compiled=is_compiled)
    sizes = run(search, fastest_at(best))
    assert search.is_settled
    assert search.size == min(best, 512)
    assert set(sizes) <= looked_at
    assert set(sizes) == looked_at or not is_compiled


def test_sizes_that_are_as_fast_need_not_be_compiled():
    assert set(run(Search(is_compiled=True), lambda size: 1.0)) == {512, 256}


def test_sizes_that_are_compiled_are_powers_of_two():
    search = Search(is_compiled=True)
    assert set(run(search, lambda size: size, batch=60)) == {1, 2, 4, 8, 16, 32, 64}
    search = Search(is_compiled=True)
    assert run(search, lambda size: 1.0, batch=60, most=50, batches=1) == [64, 32]


def test_stops_looking_in_the_middle():
    search = Search()
    run(search, lambda size: 1.0, most=100, batches=5)
    assert search.times
    assert search.best() == 64 != search.size
    search.only_fits()
    assert search.is_settled
    assert search.size == search.next() == 64


def test_first_update_of_a_size_is_not_timed():
    calls = []

    def seconds(size):
        calls.append(size)
        return 100.0 if calls.count(size) == 1 else size

    search = Search()
    sizes = run(search, seconds)
    assert sizes[:6] == [512, 512, 256, 256, 128, 128]  # each once more, and then timed
    assert search.size == 1


def test_ties_go_to_the_smaller_size_and_end():
    search = Search()
    sizes = run(search, lambda size: 1.0 if size >= 64 else 2.0)
    assert search.size == 64
    assert len(sizes) < 50
    turns = sizes[-6:]
    assert all(a != b for a, b in zip(turns, turns[1:]))  # one after the other


def test_small_batches_are_not_timed():
    search = Search()
    run(search, lambda size: 1.0, batches=1)
    run(search, lambda size: 1.0, batch=100, batches=30)
    assert not search.is_settled
    assert search.size == 512


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
    search.next()
    assert search.ran_out()  # It has settled, and runs out again.
    assert search.next() == 64
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
    assert run(Search(limit=1000, first=32), lambda size: 1.0, peak=pytest.fail) == [32]
    assert run(Search(first=32), lambda size: 1.0, most=10) == [32, 16, 8]


@pytest.mark.parametrize(
    ("seconds", "size", "why"),
    # Of each size the second one counts.
    [((9, 8, 9, 4, 9, 5), 4, "the fastest of 2, 4, 8"), ((9, 8), 8, "all at once")],
)
def test_it_settles_with_the_fastest_size_so_far(seconds, size, why):
    search = Search()
    search.meet(8, 1.0)
    for each in seconds:
        search.next()
        search.ran(8, float(each))
    search.settle()
    assert search.is_settled
    assert search.next() == size
    assert search.found() == why


# The line through peaks


JUMP = [(1, 1000), (2, 1000), (4, 1000), (8, 1400)]


@pytest.mark.parametrize(
    ("points", "given", "base", "slope"),
    [
        pytest.param([(2, 300)], {"before": 100}, 100, 100, id="one, all of its examples"),
        pytest.param([(2, 300)], {"before": 100, "once": 40}, 140, 80, id="one, but for that"),
        pytest.param([(4, 1080), (1, 1020), (2, 1040)], {"before": 100}, 1000, 20, id="a line"),
        pytest.param([(1, 500), (2, 490), (4, 480)], {"before": 100}, 490, 0, id="falling"),
        pytest.param([(8, 110), (16, 200)], {"before": 100}, 100, 11.25, id="what was there"),
        pytest.param(JUMP, {"before": 0}, 600, 100, id="the last part is steeper"),
        pytest.param([(1, 110), (2, 140), (1, 120), (2, 130)], {"before": 0}, 100, 20, id="again"),
        pytest.param([], {"before": 100}, 100, 0, id="none"),
    ],
)
def test_the_line_through_peaks(points, given, base, slope):
    line = line_through(points, **given)
    assert (line.base, line.slope) == pytest.approx((base, slope))


def test_a_line_is_never_below_what_was_seen():
    assert line_through([(1, 500), (2, 480), (4, 470)], before=100).at(1000) == 500
    assert line_through([(2, 300)], before=100, once=999).at(4) == 300
    # Small sizes do not lift a line that is steep at its end.
    assert [line_through(JUMP, before=0).at(size) for size in (1, 9)] == [1000, 1500]


def test_what_fits():
    line = line_through([(1, 120), (2, 140), (4, 180)], before=0)
    for most, margin, fits in (
        (180, 0, True),
        (179, 0, False),
        (200, 0.1, True),
        (199, 0.1, False),
    ):
        assert line.fits(4, most, margin=margin) is fits
    # By default a twentieth stays free.
    assert line.fits(4, 190)
    assert not line.fits(4, 189)


def test_growth_beyond_what_was_measured_counts_more():
    line = line_through([(1, 120), (2, 140)], before=0)
    assert line.at(4) == 180
    assert line.fits(4, 200, margin=0)
    assert not line.fits(4, 199, margin=0)
    # One point alone is on the safe side already.
    assert line_through([(1, 120)], before=100).fits(2, 140, margin=0)


@pytest.mark.parametrize("seed", range(30))
def test_noisy_points_are_on_the_safe_side(seed):
    draw = random.Random(seed)
    base, slope = draw.uniform(100, 1000), draw.uniform(0, 50)
    noise = draw.uniform(0, 30)
    sizes = [1, 2, 4, 8, 16][: draw.randint(1, 5)]
    points = [(s, round(base + slope * s + draw.uniform(0, noise))) for s in sizes]
    line = line_through(points, before=int(draw.uniform(0, base)))
    found = [line.at(size) for size in range(1, 64)]
    assert found == sorted(found)  # If a size fits, all smaller ones do.
    assert all(line.at(size) >= peak - 1e-9 for size, peak in points)
    fits = [line.fits(size, 900) for size in range(1, 64)]
    assert fits == sorted(fits, reverse=True)
    # Noise of the largest two enters the next size not more than twice.
    assert line.at(2 * sizes[-1]) >= base + slope * 2 * sizes[-1] - 2 * noise


def test_systems_that_tell_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    with pytest.raises(ValueError, match="Peak memory is measured on Linux and macOS"):
        highest_ever()


# Files


def write_and_read(size):
    """The sizes that were read, while other processes write."""
    key, found = {"whole": 64}, set()
    for _ in range(50):
        cache.write(key, cache.Found(size))
        found.add(cache.read(key).size)
    return found


def test_several_processes_never_see_half_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("MACROBATCH_CACHE", "1")
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert set().union(*pool.map(write_and_read, [1, 2, 3])) <= {1, 2, 3}
    assert len(list((tmp_path / "macrobatch" / "sizes").iterdir())) == 1
