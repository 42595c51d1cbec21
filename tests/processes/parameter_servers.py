"""Prints what each entry point says to variables of a ParameterServerStrategy.

In a process of its own, because a process can have one cluster.
"""

import os
import socket

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

import macrobatch


def address():
    with socket.socket() as free:
        free.bind(("", 0))
        return f"localhost:{free.getsockname()[1]}"


def main():
    cluster = tf.train.ClusterSpec({"worker": [address()], "ps": [address()]})
    _servers = [tf.distribute.Server(cluster, job_name=job) for job in ("worker", "ps")]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD()
    variables = model.trainable_variables
    for call in (
        lambda: macrobatch.accumulate(model, 2),
        lambda: macrobatch.GradientAccumulator(optimizer, variables),
        lambda: macrobatch.value_and_gradients(
            model, variables, tf.ones([4, 2]), micro_batch_size=2
        ),
    ):
        try:
            call()
        except ValueError as error:
            print(error, flush=True)
    os._exit(0)  # which would take long otherwise


if __name__ == "__main__":
    main()
