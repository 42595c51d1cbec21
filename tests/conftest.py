"""Everything runs in float64 unless a test says otherwise: equality is then to 1e-10."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# What XLA compiles here runs for microseconds: compile it quickly rather than well.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# Sizes that other runs have found would change what tests do.
os.environ["MACROBATCH_CACHE"] = "0"

import keras
import pytest
import tensorflow as tf

# Two devices, for the tests of replicas.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
# Models here are tiny, and tests run side by side. Threads between operations may be blocked by
# pipelines of data that nobody reads any more: with few of them, replicas wait for a minute.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(16)

# A command, tests of other environments, and scripts that tests run.
collect_ignore = ["mutants", "backends", "processes/scripts"]
# TensorFlow and Keras stay: the collector need not look through them again and again.
gc.freeze()


@pytest.fixture(autouse=True)
def double_precision():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
