"""Peaks of pieces of work, and the line through them."""

import random
import subprocess
import sys

import numpy as np
import pytest

from macrobatch._sizes import peaks
from macrobatch._sizes.peaks import ProcessCounter, line_through

MIB = 1024**2


class Meter:
    """A counter that counts what it is told."""

    def __init__(self, can_reset, used=0):
        self.can_reset, self.used, self.highest = can_reset, used, used

    def take(self, size):
        self.highest = max(self.highest, self.used + size)

    def reset(self):
        if self.can_reset:
            self.highest = self.used

    def read(self):
        return self.highest

    def now(self):
        return self.used


def test_the_peak_of_each_piece_of_work():
    meter = Meter(can_reset=True, used=10)
    assert peaks.peak_of(lambda: meter.take(5), meter) == (10, 15, True)
    assert peaks.peak_of(lambda: meter.take(3), meter) == (10, 13, True)


def test_a_peak_that_cannot_be_told():
    meter = Meter(can_reset=False, used=10)
    assert peaks.peak_of(lambda: meter.take(5), meter) == (10, 15, True)
    assert peaks.peak_of(lambda: meter.take(3), meter) == (10, 15, False)
    assert peaks.peak_of(lambda: meter.take(6), meter) == (10, 16, True)


# The memory of a process depends on all that it did before: each case has one of its own.
MEASURE = """
import sys
import numpy as np
from macrobatch._sizes import peaks

counter = peaks.ProcessCounter(*sys.argv[1:])
print(counter.can_reset)
for size in (64, 16):
    found = peaks.peak_of(lambda: np.ones(size * 1024**2, "uint8").sum(), counter)
    print((found.bytes - found.before) // 1024**2, found.is_new)
"""


def measured(*arguments):
    command = [sys.executable, "-c", MEASURE, *arguments]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [lines[0], int(lines[1]), lines[2], int(lines[3]), lines[4]]


@pytest.mark.skipif(not ProcessCounter().can_reset, reason="the kernel does not reset peaks here")
def test_the_high_water_mark_of_a_process():
    resets, first, first_is_new, second, second_is_new = measured()
    assert (resets, first_is_new, second_is_new) == ("True", "True", "True")
    assert 60 <= first <= 80
    assert 12 <= second <= 32


def test_without_a_mark_that_can_be_reset(tmp_path):
    resets, first, first_is_new, second, second_is_new = measured(str(tmp_path))
    assert (resets, second_is_new) == ("False", "False")
    assert second >= 0
    assert first_is_new == "False" or first >= 30


def test_systems_that_tell_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    with pytest.raises(ValueError, match="Peak memory is measured on Linux and macOS"):
        peaks.highest_ever()


def test_one_point_counts_as_if_all_came_from_examples():
    line = line_through([(2, 300)], before=100)
    assert (line.base, line.slope) == (100, 100)
    assert line.at(4) == 500


def test_points_on_a_line():
    line = line_through([(size, 1000 + 20 * size) for size in (4, 1, 2)], before=100)
    assert (line.base, line.slope) == pytest.approx((1000, 20))
    assert line.at(64) == pytest.approx(1000 + 20 * 64)


def test_nothing_was_measured():
    assert line_through([], before=100).at(10) == 100


def test_the_slope_is_at_least_zero_and_the_base_what_was_there():
    falling = line_through([(1, 500), (2, 480), (4, 470)], before=100)
    assert falling.slope == 0
    assert falling.at(1000) == 500
    steep = line_through([(8, 110), (16, 200)], before=100)
    assert steep.base == 100


def test_the_last_part_counts_if_it_is_steeper():
    points = [(1, 1000), (2, 1000), (4, 1000), (8, 1400)]
    assert line_through(points, before=0).slope == 100


def test_a_size_that_was_run_again_counts_with_its_highest_peak():
    points = [(1, 110), (2, 140), (1, 120), (2, 130)]
    line = line_through(points, before=0)
    assert (line.base, line.slope) == (100, 20)


def test_what_fits():
    line = line_through([(1, 120), (2, 140)], before=0)
    assert line.fits(4, 180, margin=0)
    assert not line.fits(4, 179, margin=0)
    assert line.fits(4, 200, margin=0.1)
    assert not line.fits(4, 199, margin=0.1)
    assert line.fits(4, 190)
    assert not line.fits(4, 188)
    sizes = [1, 2, 4, 8]
    assert line.largest(1000, sizes) == 8
    assert line.largest(190, sizes) == 4
    assert line.largest(50, sizes) == 0


@pytest.mark.parametrize("seed", range(30))
def test_noisy_points_are_on_the_safe_side(seed):
    draw = random.Random(seed)
    base, slope = draw.uniform(100, 1000), draw.uniform(0, 50)
    noise = draw.uniform(0, 30)
    sizes = [1, 2, 4, 8, 16][: draw.randint(1, 5)]
    points = [(s, round(base + slope * s + draw.uniform(0, noise))) for s in sizes]
    line = line_through(points, before=int(draw.uniform(0, base)))
    found = [line.at(size) for size in range(1, 64)]
    assert found == sorted(found)  # monotone: if a size fits, all smaller ones do
    assert all(line.at(size) >= peak - 1e-9 for size, peak in points)
    fits = [line.fits(size, 900) for size in range(1, 64)]
    assert fits == sorted(fits, reverse=True)
    # Noise of the largest two enters the next size not more than twice.
    assert line.at(2 * sizes[-1]) >= base + slope * 2 * sizes[-1] - 2 * noise
    assert np.isfinite(found).all()
