"""Figures from measurements: ratios, spreads, a line. Pure functions."""

from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """A median and its quartiles."""

    median: float
    low: float
    high: float


def spread(values):
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    return Spread(float(median), float(low), float(high))


def ratio(some, others):
    """The spread of ratios of two times of the same round."""
    return spread(np.divide(some, others))


def faster(some, others):
    """Of two lists of times, the one that is lower in most rounds."""
    return some if ratio(some, others).median <= 1 else others


def line(sizes, times):
    """The line a + b * size with the least relative residuals, and the largest of them.

    Least squares of (a + b * size) / time - 1: so a small batch counts as much as a large one.
    """
    sizes, times = np.asarray(sizes, float), np.asarray(times, float)
    columns = np.stack([1 / times, sizes / times], axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
    residuals = (a + b * sizes) / times - 1
    return float(a), float(b), float(np.abs(residuals).max())


def difference(found, expected, before):
    """The distance of two results over the distance that the expected one moved."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected - before))


# Figures of a section's results: what bench.py wrote. KeyError where a contender is missing
# or has failed.


def seconds(results, name):
    """Times of a contender, one for each round. The floor is the faster of its two forms."""
    contenders = results["contenders"]
    if name == "floor" and "floor, unrolled" in contenders:
        return faster(seconds(results, "floor, loop"), seconds(results, "floor, unrolled"))
    if "failed" in contenders[name]:  # It has times of some rounds only, or of none.
        raise KeyError(name)
    return contenders[name]["seconds"]


def time_ratio(results, name, other):
    return ratio(seconds(results, name), seconds(results, other))


def peak(results, name, kind="peak"):
    """The spread of peaks of a contender's processes, in MiB."""
    return spread(results["contenders"][name][kind])


def peak_ratio(results, name, other, kind="peak"):
    top, bottom = peak(results, name, kind), peak(results, other, kind)
    return Spread(*(value / bottom.median for value in top))


def growth(results, name):
    """The peak over what the process held before there was a model, in MiB."""
    contender = results["contenders"][name]
    return spread(np.subtract(contender["peak"], contender["start"]))


def count(results, name, what):
    """A number that every process of a contender should find alike; the largest, if not."""
    seconds(results, name)  # for its KeyError
    return max(results["contenders"][name][what])


def least_ratio(results, name, other, what):
    """The least of a figure over the least of another contender's."""
    return min(figure(results, name, what)) / min(figure(results, other, what))


def figure(results, name, what):
    """A figure of a contender, one value for each of its processes."""
    if "failed" in results["contenders"][name]:
        raise KeyError(name)
    return results["contenders"][name][what]
