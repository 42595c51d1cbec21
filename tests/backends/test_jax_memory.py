"""What JAX tells of memory: its errors, and the devices that it computes on."""

from types import SimpleNamespace

import pytest
from jax_support import (
    jax,
)

from macrobatch._jax import device_memory
from macrobatch._jax.auto import is_out_of_memory
from macrobatch._sizes import limit, watch

GIB = 2**30


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), True),
        (jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 9 bytes."), True),
        (jax.errors.JaxRuntimeError("INTERNAL: something else"), False),
        (ValueError("RESOURCE_EXHAUSTED"), False),
    ],
)
def test_errors(error, expected):
    assert is_out_of_memory(error) is expected


def test_an_allocation_that_cannot_be():
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.numpy.zeros(2**50, "int8"))
    assert is_out_of_memory(caught.value)


def test_on_a_cpu_memory_is_watched_in_any_case(monkeypatch):
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: True)
    assert device_memory.gpus() == device_memory.names() == []
    assert device_memory.size() is None
    assert watch.needed(None, device_memory, host_raises=False) is not None
    assert watch.needed(None, device_memory) is None


def test_a_gpu(monkeypatch):
    def device(used):
        stats = {"bytes_in_use": used, "peak_bytes_in_use": 2 * used, "bytes_limit": 8 * GIB}
        return SimpleNamespace(platform="gpu", device_kind="A GPU", memory_stats=lambda: stats)

    monkeypatch.setattr(jax, "local_devices", lambda: [device(GIB), device(GIB // 2)])
    assert device_memory.names() == ["A GPU", "A GPU"]
    assert watch.needed(None, device_memory, host_raises=False) is None
    found = watch.needed(0.5, device_memory, host_raises=False)
    assert found.limit.bytes == 4 * GIB
    assert found.before == GIB
    found.counter.reset()
    assert found.counter.read() == 2 * GIB
