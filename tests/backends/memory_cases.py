"""What test_memory.py runs in a process of its own: a model whose plain step does not fit into what
the kernel allows.

    KERAS_BACKEND=torch python memory_cases.py MIB TIMES

trains in MIB more than the process has, on batches of TIMES 512 rows, and prints how far that ends
from unlimited training.
"""

import contextlib
import json
import os
import resource
import sys

os.environ["MACROBATCH_CACHE"] = "0"
os.environ.setdefault("JAX_ENABLE_X64", "1")

import keras
import numpy as np
from keras.src.backend.common import dtypes

import macrobatch

if keras.backend.backend() == "jax":
    from macrobatch._jax.auto import Auto

UNITS = 32768  # 256 KiB an example, for each of some five tensors


def build():
    keras.utils.set_random_seed(0)
    layers = [keras.Input([None, 4]), keras.layers.Dense(UNITS, "tanh")]
    model = keras.Sequential([*layers, keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def examples(count, length=1):
    random = np.random.default_rng(0)
    return random.normal(size=[count, length, 4]), random.normal(size=[count, length, 1])


def from_the_start(times):
    """All batches of one size, of which the first does not fit."""
    return [examples(512 * times)] * 3


def longer_in_the_middle(times):
    """Batches of short examples, which fit, and longer ones later."""
    return [examples(64)] * 2 + [examples(64, 8 * times)] * 2 + [examples(64)]


@contextlib.contextmanager
def limited(mebibytes):
    """Lets this process have no more address space than that beyond what it has."""
    with open("/proc/self/status") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    size = int(fields["VmSize"].split()[0]) * 1024 + mebibytes * 2**20
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fitted(model, batches):
    """Trains on batches that come once. Returns where training ended, and sizes."""
    options = {"steps_per_epoch": len(batches), "shuffle": False, "verbose": 0}
    sizes = model.fit((batch for batch in batches), **options).history.get("micro_batch_size")
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(v.value)) for v in variables], sizes


def main(mebibytes, times):
    for name in list(dtypes.BIT64_TO_BIT32_DTYPE):
        dtypes.BIT64_TO_BIT32_DTYPE[name] = name
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    cases = [from_the_start, longer_in_the_middle]
    unlimited = [fitted(build(), case(times))[0] for case in cases]
    found = {}
    with limited(mebibytes):
        for case, expected in zip(cases, unlimited):
            if keras.backend.backend() == "jax":
                # Memory is watched on a CPU, because XLA may end the process. But its large buffers
                # are an error.
                Auto.host_raises = case is from_the_start
            ended, sizes = fitted(macrobatch.accumulate(build()), case(times))
            furthest = max(float(np.abs(a - b).max()) for a, b in zip(ended, expected))
            found[case.__name__] = {"difference": furthest, "sizes": sizes}
        try:
            fitted(build(), from_the_start(times))
        except Exception as error:
            found["plain"] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
