"""Contenders whose sizes are found while they train."""

import logging
import os
import resource
import statistics
import time

os.environ["MACROBATCH_CACHE"] = "0"

import contender
import keras_contenders

import macrobatch

MOST = 300  # updates in which a size must be found
versions = keras_contenders.versions
LOGGED = []
logging.getLogger("macrobatch").addFilter(lambda line: LOGGED.append(line.getMessage()) or True)


def training(description):
    """The contender of this description."""
    ways = {"settled": settled, "looking": Looking, "limited": Limited}
    return ways[description["way"]](**description["options"])


def fit_of(memory_limit=None, **options):
    model = keras_contenders.compiled(**options)
    macrobatch.accumulate(model, "auto", memory_limit=memory_limit)
    return keras_contenders.Fit(model, **options)


def settle(fit):
    """Trains until the log says that a size has been found. Returns the number of updates."""
    for update in range(1, MOST + 1):
        fit.step()
        if any(line.startswith("macrobatch: micro_batch_size=") for line in LOGGED):
            return update
    raise RuntimeError(f"No size was found in {MOST} updates.")


def settled(**options):
    fit = fit_of(**options)
    settle(fit)
    return fit


class Looking:
    """Measures what looking for a size costs, with the trace of the first step left out."""

    def __init__(self, **options):
        self.fit = fit_of(**options)

    def first(self):
        self.fit.step()
        start = time.perf_counter()
        updates = settle(self.fit)
        seconds = time.perf_counter() - start
        after = statistics.median(contender.seconds_of(self.fit.step) for _ in range(9))
        return {"updates": updates + 1, "seconds": seconds, "lost": seconds - updates * after}


class Limited:
    """Trains within a limit of memory."""

    def __init__(self, more, **options):
        start = contender.restarted_peak()
        self.limit = start + more
        self.fit = fit_of(f"{int(self.limit)}MiB", **options)

    def first(self):
        found = self.fit.model.fit(self.fit.batches, steps_per_epoch=12, verbose=0)
        # The search restarts the high-water mark that /proc shows. This one nobody can restart.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        shares = {"limit": self.limit, "peak": peak, "share": peak / self.limit}
        return {**shares, "micro_batch_size": found.history["micro_batch_size"][-1]}
