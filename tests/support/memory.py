"""Memory that runs out where a test says so, on any backend, and a clock that only models move.

The fixtures `room`, `counted` and `clock` of conftest.py put them in place.
"""

from types import SimpleNamespace

import keras
import numpy as np

from support import BACKEND, inside

if BACKEND == "tensorflow":
    import tensorflow as tf
    from tensorflow import errors

    OutOfMemory = errors.ResourceExhaustedError
elif BACKEND == "jax":
    import jax
    from jax import errors

    OutOfMemory = errors.JaxRuntimeError
else:
    import torch as errors

    OutOfMemory = errors.OutOfMemoryError

MIB = 2**20
BASE = 64 * MIB  # what a process has before any batch


def ran_out(size):
    """The error of a function that a backend calls. The backend makes one of its own of it."""
    if BACKEND == "torch":
        return RuntimeError(f"DefaultCPUAllocator: can't allocate memory: no room for {size}")
    return MemoryError(f"RESOURCE_EXHAUSTED: no room for {size}")


class Room(keras.layers.Layer):
    """A layer with room for so many numbers at a time.

    Attributes:
        most: how many.
        ran: how many there were in each micro-batch that had room.
        bytes: of so many numbers.
        seconds: for so many numbers, on the clock.
        now: the time on the clock.
    """

    most, ran, now = 10**9, [], 0.0
    supports_masking = True

    @staticmethod
    def bytes(numbers):
        return MIB * numbers

    @staticmethod
    def seconds(numbers):
        return 0.0

    @classmethod
    def narrow(cls, most):
        """Makes room for no more than that, from now on."""
        cls.most = most
        cls.ran.clear()

    @classmethod
    def take(cls, values):
        """Takes the memory of values, and returns them."""
        size = int(np.prod(values.shape))
        if size > cls.most:
            raise ran_out(size)
        cls.ran.append(size)
        cls.now += cls.seconds(size)
        return values

    def call(self, inputs):
        return taken(inputs)

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)


def taken(values):
    """Values, whose memory is taken whenever they are computed."""
    if BACKEND == "torch":
        return values if values.device.type == "meta" else Room.take(values)
    if BACKEND == "jax":
        return _taken_on_jax(values)
    if tf.executing_eagerly():
        try:
            return Room.take(values)
        except MemoryError as error:
            raise OutOfMemory(None, None, str(error)) from None
    with tf.control_dependencies([tf.py_function(Room.take, [values], values.dtype)]):
        return tf.identity(values)


def _taken_on_jax(values):
    @jax.custom_jvp
    def identity(values):
        if not isinstance(values, jax.core.Tracer):
            return Room.take(values)
        shape = jax.ShapeDtypeStruct(values.shape, values.dtype)
        return jax.pure_callback(Room.take, shape, values)

    identity.defjvp(lambda values, tangents: (identity(*values), tangents[0]))
    return identity(values)


class Counter:
    """Counts the memory that `Room` takes, as the system counts that of a process.

    Attributes:
        base: bytes that were there before.
        left: bytes that each piece of work leaves behind.
        resets: how often it was asked to forget the past.
    """

    can_reset, base, left, resets = True, BASE, 0, 0

    def reset(self):
        if self.can_reset:
            self.resets += 1
            Room.ran.clear()

    def now(self):
        return self.base + self.left * max(0, self.resets - 1)

    def read(self):
        return self.now() + Room.bytes(max(Room.ran, default=0))


def limit_for(numbers):
    """A memory_limit that has room for so many numbers, and a twentieth that stays free."""
    return int((BASE + MIB * numbers) / 0.95)


def run_each_time(function):
    """Runs a function whenever a step is run; on JAX, when it is traced."""
    if BACKEND == "tensorflow" and not tf.executing_eagerly():
        tf.py_function(function, [], [])
    else:
        function()


def pretend_gpu(monkeypatch, size):
    """Computes on a GPU of a size, whose memory `Room` takes. If that is None, it tells nothing."""
    counter = Counter()
    if BACKEND == "tensorflow":
        gpu = tf.config.list_logical_devices("CPU")[0]
        sizes = [SimpleNamespace(memory_limit=size // MIB)] if size else []
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [gpu])
        monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: sizes)
        tells = {
            "get_device_details": lambda gpu: {"device_name": "A GPU"},
            "get_memory_info": lambda name: {"current": counter.now(), "peak": counter.read()},
            "reset_memory_stats": lambda name: counter.reset(),
        }
        for name, function in tells.items():
            monkeypatch.setattr(tf.config.experimental, name, function)
    elif BACKEND == "jax":

        def memory_stats():
            used = {"bytes_in_use": counter.now(), "peak_bytes_in_use": counter.read()}
            return {**used, "bytes_limit": size} if size else None

        gpu = SimpleNamespace(device_kind="A GPU", memory_stats=memory_stats)
    else:
        gpu = SimpleNamespace(__name__="torch.cuda", memory_allocated=counter.now)
        gpu.synchronize = gpu.empty_cache = gpu.current_device = lambda: 0
        if size:
            gpu.get_device_name = lambda: "A GPU"
            gpu.get_device_properties = lambda device: SimpleNamespace(total_memory=size)
            gpu.max_memory_allocated = counter.read
            gpu.reset_peak_memory_stats = counter.reset
    inside.pretend_gpus(monkeypatch, [gpu])
