"""What tests of memory run in processes of their own, with as much of it as they like or with a
limit that the kernel holds: a model whose plain step does not fit.

    KERAS_BACKEND=torch python memory_cases.py MIB TIMES [compiled]

trains in MIB more than the process has, on batches of TIMES 512 rows, and prints how far that ends
from unlimited training. "compiled" trains steps that XLA compiles.
"""

import contextlib
import json
import os
import resource
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ["MACROBATCH_CACHE"] = "0"

import keras
import numpy as np

import macrobatch

UNITS = 32768  # 256 KiB an example, for each of some five tensors


def layers_of():
    layers = [keras.Input([None, 4]), keras.layers.Dense(UNITS, "tanh")]
    return keras.Sequential([*layers, keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])


def build(optimizer=keras.optimizers.Adam, **options):
    keras.utils.set_random_seed(0)
    model = layers_of()
    model.compile(optimizer(0.01), "mse", metrics=["mae"], **options)
    return model


def examples(count, length=1):
    random = np.random.default_rng(0)
    return random.normal(size=[count, length, 4]), random.normal(size=[count, length, 1])


def from_the_start(times):
    """All batches of one size, of which the first does not fit."""
    return [examples(512 * times)] * 3


def longer_in_the_middle(times):
    """Batches of short examples, which fit, and longer ones later."""
    return [examples(64), *[examples(64, 8 * times)] * 2, examples(64)]


def larger_in_the_middle(times):
    """Batches of some examples, which fit, and larger ones later."""
    return [examples(64)] * 3 + [examples(512 * times)] * 3


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


def in_float64():
    """Prepares the backend: one thread, and float64 that is float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    else:
        from keras.src.backend.common import dtypes

        dtypes.BIT64_TO_BIT32_DTYPE.update({name: name for name in dtypes.BIT64_TO_BIT32_DTYPE})


def main(mebibytes, times, **options):
    in_float64()
    # XLA itself takes memory for each size. TensorFlow may end the process if there is none left.
    cases = [larger_in_the_middle] if options else [from_the_start, longer_in_the_middle]
    ended, found = {}, {"plain": ""}
    # What any training takes once, threads for instance, is taken before the limit. Unlimited
    # training comes last: its address space stays, and plain training would fit in there.
    fitted(build(**options), [examples(8)])
    fitted(macrobatch.accumulate(build(**options), 4), [examples(8)])
    with limited(mebibytes):
        try:  # Without XLA, which would take the weights with it.
            fitted(build(), from_the_start(times))
        except Exception as error:
            found["plain"] = f"{type(error).__name__}: {error}"[:300]
        for case in cases:
            batches = case(times)
            ended[case], sizes = fitted(macrobatch.accumulate(build(**options)), batches)
            most = max(len(x) for x, _ in batches)
            found[case.__name__] = {"sizes": sizes, "examples": most}
    for case in cases:
        expected, _ = fitted(build(**options), case(times))
        furthest = max(float(np.abs(a - b).max()) for a, b in zip(ended[case], expected))
        found[case.__name__]["difference"] = furthest
    print(json.dumps(found))


if __name__ == "__main__":
    compiled = {"jit_compile": True, "optimizer": keras.optimizers.SGD}
    main(*map(int, sys.argv[1:3]), **(compiled if "compiled" in sys.argv else {}))
