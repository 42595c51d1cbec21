"""The memory of the GPUs or TPUs that JAX computes on: what is in use, and the peak of it."""

from typing import Any, List, Optional

import jax


def gpus() -> List[Any]:
    """The accelerators of this process; none on a CPU."""
    return [device for device in jax.local_devices() if device.platform != "cpu"]


def names() -> List[str]:
    """The names of the accelerators."""
    return [str(device.device_kind) for device in gpus()]


def size() -> Optional[int]:
    """Bytes that JAX may use of the smallest accelerator; None if it does not say."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in gpus()]
    return min((int(limit) for limit in limits if limit), default=None)


class GpuCounter:
    """The peak of the accelerator that has the most in use. See _sizes.peaks.Counter."""

    can_reset = False  # JAX has no way to.

    def reset(self) -> None:
        """JAX forgets no peaks."""

    def read(self) -> int:
        """The peak, in bytes."""
        return self._most("peak_bytes_in_use")

    def now(self) -> int:
        """What is in use, in bytes."""
        return self._most("bytes_in_use")

    def _most(self, which: str) -> int:
        return max(int((device.memory_stats() or {}).get(which, 0)) for device in gpus())
