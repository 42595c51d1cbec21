"""TensorFlow and Keras as tests have them: two devices, few threads, batches without a trace."""

import gc
import random

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed

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


class Seeds:
    """A new global seed lets kernels go only if random numbers were drawn with the old one.

    TensorFlow lets all kernels go, so that those which draw start anew. To make them again takes a
    third of the time of a small eager `fit`. Whatever draws asks for its seed first, in `get_seed`;
    a function that is traced already does not ask again, and may go on drawing where it was.
    """

    were_asked_for = False

    @classmethod
    def get(cls, op_seed, get_seed=random_seed.get_seed):
        cls.were_asked_for = True
        return get_seed(op_seed)

    @classmethod
    def set(cls, seed, set_seed=context.set_global_seed):
        if cls.were_asked_for or not isinstance(seed, int):
            set_seed(seed)
        else:
            context.context()._seed, context.context()._rng = seed, random.Random(seed)
        cls.were_asked_for = False


random_seed.get_seed = Seeds.get
context.set_global_seed = Seeds.set


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

# TensorFlow and Keras stay: the collector need not look through them again and again.
gc.freeze()
