"""The memory of GPUs: TensorFlow counts what is in use on each, and the peak of it."""

from typing import Any, List, Optional

import tensorflow as tf


def gpus() -> List[Any]:
    """The GPUs that TensorFlow uses."""
    return list(tf.config.list_logical_devices("GPU"))


def names() -> List[str]:
    """The names of the GPUs that there are."""
    found = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in found]
    return [str(each.get("device_name")) for each in details]


def size() -> Optional[int]:
    """Bytes of the smallest GPU that was configured with a limit; None if none was.

    TensorFlow does not say how large a GPU is.
    """
    limits = [
        each.memory_limit
        for gpu in tf.config.list_physical_devices("GPU")
        for each in tf.config.get_logical_device_configuration(gpu) or []
        if each.memory_limit is not None
    ]
    return min(limits) * 1024**2 if limits else None


class GpuCounter:
    """The peak of the GPU that has the most in use. See _sizes.peaks.Counter."""

    can_reset = True

    def __init__(self) -> None:
        self._names = [device.name for device in gpus()]

    def reset(self) -> None:
        """Forgets peaks of the past."""
        for name in self._names:
            tf.config.experimental.reset_memory_stats(name)

    def read(self) -> int:
        """The peak since, in bytes."""
        return self._most("peak")

    def now(self) -> int:
        """What is in use, in bytes."""
        return self._most("current")

    def _most(self, which: str) -> int:
        return max(int(tf.config.experimental.get_memory_info(name)[which]) for name in self._names)
