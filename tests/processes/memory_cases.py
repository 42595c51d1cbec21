"""What test_memory.py runs in processes of their own, with as much memory as it likes or with a
limit that the kernel holds: a model whose plain step does not fit.

    python memory_cases.py MIB [compiled]

trains in MIB more than the process has, and prints how far that ends from unlimited training.
"compiled" trains steps that XLA compiles.
"""

import contextlib
import json
import os
import resource
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["MACROBATCH_CACHE"] = "0"

import keras
import numpy as np
import tensorflow as tf

import macrobatch

UNITS = 32768  # 256 KiB an example, for each of some five tensors


def layers_of():
    layers = [keras.Input([None, 4]), keras.layers.Dense(UNITS, "tanh")]
    return keras.Sequential([*layers, keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])


def build(optimizer=keras.optimizers.Adam, **options):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    model = layers_of()
    model.compile(optimizer(0.01), "mse", metrics=["mae"], **options)
    return model


def examples(count, length=1):
    random = np.random.default_rng(0)
    return random.normal(size=[count, length, 4]), random.normal(size=[count, length, 1])


def from_the_start():
    """All batches of one size, of which the first does not fit."""
    return [examples(512)] * 6


def longer_in_the_middle():
    """Batches of short examples, which fit, and longer ones later."""
    return [examples(64)] * 3 + [examples(64, 8)] * 2 + [examples(64)] * 2


def larger_in_the_middle():
    """Batches of some examples, which fit, and larger ones later."""
    return [examples(64)] * 3 + [examples(512)] * 3


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
    types = tuple(tf.TensorSpec([None, None, size], tf.float64) for size in (4, 1))
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=types)
    options = {"steps_per_epoch": len(batches), "shuffle": False, "verbose": 0}
    sizes = model.fit(dataset, **options).history.get("micro_batch_size")
    return [np.array(v.value) for v in [*model.variables, *model.optimizer.variables]], sizes


def main(mebibytes, **options):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    # XLA itself takes memory for each size. TensorFlow may end the process if there is none left.
    compiled = [larger_in_the_middle]
    cases = compiled if options else [from_the_start, longer_in_the_middle]
    ended, found = {}, {}
    # What any training takes once, threads for instance, is taken before the limit. Unlimited
    # training comes last: its address space stays, and plain training would fit in there.
    fitted(build(**options), [examples(8)])
    fitted(macrobatch.accumulate(build(**options), 4), [examples(8)])
    with limited(mebibytes):
        try:  # Without XLA, which would take the weights with it.
            fitted(build(), from_the_start())
        except tf.errors.ResourceExhaustedError:
            found["plain"] = "ran out"
        for case in cases:
            ended[case], sizes = fitted(macrobatch.accumulate(build(**options)), case())
            found[case.__name__] = {"sizes": sizes}
    for case in cases:
        expected, _ = fitted(build(**options), case())
        furthest = max(float(np.abs(a - b).max()) for a, b in zip(ended[case], expected))
        found[case.__name__]["difference"] = furthest
    print(json.dumps(found))


if __name__ == "__main__":
    compiled = {"jit_compile": True, "optimizer": keras.optimizers.SGD}
    main(int(sys.argv[1]), **(compiled if "compiled" in sys.argv else {}))
