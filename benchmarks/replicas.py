"""What exchanging gradients costs: bytes and time per update, of two workers on this machine.

All contenders make the same update of a model of 10.5 million parameters, from K micro-batches on
each of two workers, which are processes that talk over the loopback interface:

    macrobatch    micro-batches are summed on each worker; workers exchange the sum, once per update
    textbook      workers exchange the gradients of every micro-batch, and add up what they get

and each has a twin that does the same work without any exchange, on both workers at the same time.
What an update takes longer than its twin's is the time lost to communication. An update is as slow
as the slower worker, so a time is that of the slower worker, twins included.

All of them take turns, so that a busy machine slows all of them; so do all-reduces of several
sizes by themselves, from which scaling_model.py gets its latency and its bandwidth. Tables have
medians and quartiles over rounds. What was timed while other processes were busy is timed again,
within limits. Bytes are those that the loopback interface counted: what both workers sent to each
other, headers and acknowledgements included. Linux only.

    python benchmarks/replicas.py [--rounds 15] [--json FILE] [--picture FILE]
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import scaling_model

WORKERS = 2
MICRO_BATCHES = (1, 2, 4, 8, 16)
MICRO_BATCH_SIZE = 8  # on each worker
WIDTHS = (1024, 2048, 2048, 2048, 10)
LEARNING_RATE = 1e-3
PATIENCE = 300  # seconds to wait, in all, for other processes to leave the machine alone
# Bytes of the all-reduces by themselves. The last two have the size of the gradients between them.
MESSAGES = (32, 2**20, 2**22, 2**24, 2**25, 3 * 2**24)


# The parent


def start_workers(arguments):
    """Runs this file once for each worker, and waits for all of them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that workers end, too
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(WORKERS)]}
    with tempfile.TemporaryFile() as log:  # shown if a worker fails: TensorFlow says a lot
        workers = []
        for index in range(WORKERS):
            config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
            environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
            environment["CUDA_VISIBLE_DEVICES"] = ""
            environment["no_proxy"] = "127.0.0.1"  # or gRPC may send messages to a proxy
            command = [sys.executable, __file__, *arguments]
            workers.append(subprocess.Popen(command, env=environment, stderr=log))
        try:
            # If one fails the other waits forever.
            while any(w.poll() is None for w in workers) and not any(w.poll() for w in workers):
                time.sleep(0.2)
        finally:
            failed = any(worker.returncode != 0 for worker in workers)
            for worker in workers:
                worker.kill()
                worker.wait()
        if failed:
            log.seek(0)
            raise SystemExit(log.read().decode(errors="replace") + "A worker failed: see above.")


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


# A worker


def make_strategy():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    # Each worker computes on one core. The other threads wait for messages most of the time.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(4)
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def build_model():
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(WIDTHS[:1])])
    for width in WIDTHS[1:-1]:
        # Smooth: a ReLU that falls the other way for the last digit makes rounding grow.
        model.add(keras.layers.Dense(width, activation="tanh"))
    model.add(keras.layers.Dense(WIDTHS[-1]))
    model.compile(
        optimizer=keras.optimizers.SGD(LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.optimizer.build(model.trainable_variables)
    return model


def make_batches(worker):
    """A batch for each K, of which every worker has its own part."""
    import tensorflow as tf

    random = np.random.default_rng(worker)
    n = max(MICRO_BATCHES) * MICRO_BATCH_SIZE
    x = tf.constant(random.normal(size=(n, WIDTHS[0])), tf.float32)
    y = tf.constant(random.integers(0, WIDTHS[-1], n))
    return {k: (x[: k * MICRO_BATCH_SIZE], y[: k * MICRO_BATCH_SIZE]) for k in MICRO_BATCHES}


def macrobatch_step(strategy):
    """The train step that `fit` would take."""
    import tensorflow as tf

    import macrobatch

    with strategy.scope():
        model = macrobatch.accumulate(build_model(), MICRO_BATCH_SIZE)
    return tf.function(lambda batch: strategy.run(model.train_step, args=(batch,))), model


def textbook_step(strategy, exchange):
    """Gradients of each micro-batch are summed over workers, then over micro-batches."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        model = build_model()
    variables = model.trainable_variables
    losses_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def gradients_of(x, y, examples):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses_of(y, model(x, training=True))) / examples
        return tape.gradient(loss, variables)

    def on_replica(x, y):
        context = tf.distribute.get_replica_context()
        k = len(x) // MICRO_BATCH_SIZE
        sums = None
        for micro_batch in zip(tf.split(x, k), tf.split(y, k)):
            gradients = gradients_of(*micro_batch, examples=len(x) * WORKERS)
            if exchange:  # in one call, which packs them into one message
                gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
            sums = [s + g for s, g in zip(sums, gradients)] if sums else gradients
        # Not model.optimizer.apply: it would exchange once more.
        context.merge_call(update, args=(sums,))
        return sums[-1]

    def update(strategy, sums):
        for variable, gradient in zip(variables, sums):
            strategy.extended.update(
                variable.value, lambda v, g: v.assign_sub(LEARNING_RATE * g), args=(gradient,)
            )

    return tf.function(lambda batch: strategy.run(on_replica, args=batch)), model


def all_reduce_of(strategy, size):
    """An all-reduce of so many bytes, as of a model's gradients: packed, exchanged, unpacked."""
    import tensorflow as tf

    parts = 2 * (len(WIDTHS) - 1)
    tensors = [tf.zeros([size // 4 // parts]) for _ in range(parts)]

    def on_replica(tensors):
        context = tf.distribute.get_replica_context()
        tensors = [tf.identity(t) for t in tensors]  # on the device of this replica
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)[-1]

    step = tf.function(lambda *tensors: strategy.run(on_replica, args=(tensors,)))
    return lambda: step(*tensors)


def all_reduces_in(step, batch):
    """The number of elements of each all-reduce that an update makes."""
    graph = step.get_concrete_function(batch).graph
    found = [op for op in graph.get_operations() if op.type.startswith("CollectiveReduce")]
    return [op.inputs[0].shape.num_elements() for op in found]


def loopback_bytes():
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line.split(":")[1].split()[0] for line in lines if line.strip()[:3] == "lo:"))


def user_seconds():
    """Processor time that all processes of the machine took so far, outside of the kernel."""
    user, nice = Path("/proc/stat").read_text().split()[1:3]
    return (int(user) + int(nice)) / os.sysconf("SC_CLK_TCK")


class Meter:
    """Times work on all workers at the same time."""

    def __init__(self, strategy):
        import tensorflow as tf

        def on_replica(values):
            context = tf.distribute.get_replica_context()
            mine = tf.one_hot(context.replica_id_in_sync_group, WORKERS, dtype=tf.float64)
            return context.all_reduce(tf.distribute.ReduceOp.SUM, mine[:, None] * values)

        self.gather = tf.function(lambda values: strategy.run(on_replica, args=(values,)))
        self.patience = PATIENCE
        self.disturbed = []

    def of_all(self, *values):
        """For each value, those of all workers, once all of them have got here."""
        import tensorflow as tf

        return self.gather(tf.constant(values, tf.float64)).numpy().T

    def wait(self):
        self.of_all(0.0, 0.0, 0.0)

    def __call__(self, step, times):
        """Seconds of the slower worker and bytes of all, each for one of so many steps.

        While other processes are busy it tries again, as long as there is patience.
        """
        while True:
            seconds, size, others = self.measure(step, times)
            disturbed = others > 0.1 * os.cpu_count() * seconds
            if not disturbed or self.patience <= 0:
                self.disturbed.append(bool(disturbed))
                return seconds / times, size / times
            time.sleep(1)
            self.patience -= 1 + seconds

    def measure(self, step, times):
        self.wait()
        size, all_user, own_user = loopback_bytes(), user_seconds(), os.times().user
        start = time.perf_counter()
        for _ in range(times):
            result = step()
        finish(result)
        seconds = time.perf_counter() - start
        all_user, own_user = user_seconds() - all_user, os.times().user - own_user
        seconds, all_user, own_user = self.of_all(seconds, all_user, own_user)
        # All workers have to come to the same conclusions, so these are the first one's.
        return max(seconds), loopback_bytes() - size, all_user[0] - sum(own_user)


def finish(result):
    import tensorflow as tf

    for tensor in tf.nest.flatten(result):
        tensor.numpy()


def work(rounds, output):
    """What each worker does. The first one says how far it is, and writes what was found."""
    strategy = make_strategy()
    import keras
    import tensorflow as tf

    worker = strategy.cluster_resolver.task_id

    def say(text, end="\n"):
        if worker == 0:
            print("  " + text, end=end, flush=True)

    batches = make_batches(worker)
    contenders = {
        "macrobatch": macrobatch_step(strategy),
        "macrobatch, no exchange": macrobatch_step(tf.distribute.OneDeviceStrategy("CPU:0")),
        "textbook": textbook_step(strategy, exchange=True),
        "textbook, no exchange": textbook_step(strategy, exchange=False),
    }
    steps = {way: step for way, (step, _) in contenders.items()}
    models = {way: model for way, (_, model) in contenders.items()}
    reduces = {size: all_reduce_of(strategy, size) for size in MESSAGES}

    meter = Meter(strategy)
    meter.wait()
    for reduce in reduces.values():
        for _ in range(3):
            finish(reduce())
    for k in MICRO_BATCHES:
        say(f"warming up: K = {k}")
        for step in steps.values():
            for _ in range(2):
                finish(step(batches[k]))
    # So far all models have made the same updates.
    ends = [models[way].get_weights() for way in scaling_model.WAYS]
    keras.utils.set_random_seed(0)
    start = build_model().get_weights()
    updates = [
        {"way": way, "K": k, "all-reduces": all_reduces_in(step, batches[k])}
        for way, step in steps.items()
        for k in MICRO_BATCHES
    ]
    messages = [{"bytes": size} for size in MESSAGES]
    for row in updates + messages:
        row.update({"seconds": [], "loopback bytes": []})

    def measure(row, step, times):
        for name, value in zip(("seconds", "loopback bytes"), meter(step, times)):
            row[name].append(value)

    shuffled = np.random.default_rng(0).permutation  # the same on all workers
    for i in range(rounds):
        for k in shuffled(MICRO_BATCHES):
            load = os.getloadavg()[0]
            say(f"round {i + 1} of {rounds}: K = {k}, load {load:.1f}    ", end="\r")
            for row in shuffled([row for row in updates if row["K"] == k]):
                measure(row, lambda row=row: steps[row["way"]](batches[row["K"]]), max(1, 8 // k))
        for row in shuffled(messages):
            measure(row, reduces[row["bytes"]], 20 if row["bytes"] < 2**20 else 2)
    say("")

    if worker == 0:
        results = {
            "machine": f"{os.cpu_count()} CPUs ({cpu_name()}), Linux",
            "versions": f"TensorFlow {tf.__version__}, Keras {keras.__version__}",
            "workers": WORKERS,
            "micro-batch size": MICRO_BATCH_SIZE,
            "parameters": models["macrobatch"].count_params(),
            "rounds": rounds,
            "disturbed": float(np.mean(meter.disturbed)),
            "largest difference of weights": largest_difference(*ends),
            "largest change of a weight": largest_difference(ends[0], start),
            "updates": updates,
            "messages": messages,
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")
    meter.wait()


def largest_difference(some, others):
    return max(float(abs(a - b).max()) for a, b in zip(some, others))


def cpu_name():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="how often everything is timed")
    parser.add_argument("--json", type=Path, default="build/replicas.json", metavar="FILE")
    parser.add_argument("--picture", type=Path, default="build/scaling.png", metavar="FILE")
    options = parser.parse_args()
    if "TF_CONFIG" in os.environ:
        work(options.rounds, options.json)
        return
    print(f"{WORKERS} workers on loopback; {options.rounds} rounds take some minutes", flush=True)
    start_workers(sys.argv[1:])
    scaling_model.report(options.json, options.picture)


if __name__ == "__main__":
    main()
