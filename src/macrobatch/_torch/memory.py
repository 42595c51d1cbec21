"""Errors of torch that say that there was not enough memory."""

import torch

# torch has no class for what other allocators than those of CUDA raise. Only the text tells.
_TEXTS = (
    *("DefaultCPUAllocator", "can't allocate memory", "not enough memory"),
    "backend out of memory",  # of Apple's GPUs
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory, on a device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
