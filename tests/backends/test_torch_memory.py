"""What torch tells of memory: its errors, and the GPU that Keras computes on."""

from types import SimpleNamespace

import pytest
from torch_support import (
    torch,
)

from macrobatch._sizes import watch
from macrobatch._torch import device_memory
from macrobatch._torch.memory import is_out_of_memory

GIB = 2**30
HOST = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError(HOST), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(HOST), False),
    ],
)
def test_errors(error, expected):
    assert is_out_of_memory(error) is expected


def test_an_allocation_that_cannot_be():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)


def gpu(**more):
    return SimpleNamespace(
        __name__="torch.cuda",
        current_device=lambda: 0,
        get_device_name=lambda: "A GPU",
        get_device_properties=lambda device: SimpleNamespace(total_memory=8 * GIB),
        memory_allocated=lambda: GIB,
        **more,
    )


def test_there_is_no_gpu_here():
    assert device_memory.gpus() == device_memory.names() == []
    assert device_memory.size() is None
    device_memory.wait()
    device_memory.give_back()


def test_a_gpu(monkeypatch):
    resets = []
    peaks = {
        "max_memory_allocated": lambda: 2 * GIB,
        "reset_peak_memory_stats": lambda: resets.append(1),
    }
    monkeypatch.setattr(device_memory, "gpus", lambda: [gpu(**peaks)])
    assert device_memory.names() == ["A GPU"]
    assert watch.needed(None, device_memory) is None
    found = watch.needed(0.5, device_memory)
    assert found.limit.bytes == 4 * GIB
    assert found.before == GIB
    found.counter.reset()
    assert (found.counter.read(), resets) == (2 * GIB, [1])


def test_a_gpu_whose_peaks_nobody_tells(monkeypatch):
    monkeypatch.setattr(device_memory, "gpus", lambda: [gpu()])
    assert watch.needed(None, device_memory) is None
    with pytest.raises(ValueError, match=r"does not tell the peak.*torch\.cuda.*Leave"):
        watch.needed("1GiB", device_memory)
