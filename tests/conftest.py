"""Everything runs in float64 unless a test says otherwise: equality is then to 1e-10."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# What XLA compiles here runs for microseconds: compile it quickly rather than well.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# Sizes that other runs have found would change what tests do.
os.environ["MACROBATCH_CACHE"] = "0"

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable

from macrobatch._fit.meeting import Meeting

# Two devices, for the tests of replicas.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
# Models here are tiny, and tests run side by side. Threads between operations may be blocked by
# pipelines of data that nobody reads any more: with few of them, replicas wait for a minute.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(16)

# Functions run a few times: optimizing their graphs takes longer than it saves.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

# A command, tests of other environments, and scripts that tests run.
collect_ignore = ["mutants", "backends", "processes/scripts"]
# TensorFlow and Keras stay: the collector need not look through them again and again.
gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def kept_graphs():
    """TensorFlow keeps the graphs of functions in functions: they need not be looked through."""
    yield
    gc.collect()
    gc.freeze()


def in_order(adapter, plain=ArrayDataAdapter.get_tf_dataset):
    """The batches of arrays in their order: as Keras makes them, without the functions it traces.

    Tracing these functions would take a fifth of the time of all tests.
    """
    arrays = convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    if adapter._shuffle or not all(type(leaf) is np.ndarray for leaf in keras.tree.flatten(arrays)):
        return plain(adapter)
    batches = tf.data.Dataset.from_tensor_slices(keras.tree.lists_to_tuples(arrays))
    batches = batches.batch(adapter._batch_size, drop_remainder=not adapter._partial_batch_size)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    options.autotune.enabled = False  # which may stall a pipeline for seconds
    return batches.with_options(options)


ArrayDataAdapter.get_tf_dataset = in_order


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        words = [word for mark in item.iter_markers("thorough_for") for word in mark.args]
        if words and any(word in item.callspec.id for word in words):
            item.add_marker("thorough")


@pytest.fixture(autouse=True)
def trials(request, monkeypatch):
    """Whether examples meet is tried by the tests about that. `make test-all` tries all models."""
    if request.config.option.markexpr and not request.node.get_closest_marker("examples_meet"):
        monkeypatch.setattr(Meeting, "start", lambda self: None)
        monkeypatch.setattr(Meeting, "watching", lambda self, step: step)


@pytest.fixture(autouse=True)
def double_precision():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
