"""Errors of torch that say that there was not enough memory."""

import torch

# torch has no class for what other allocators than its own on a GPU raise. Only the text tells.
_TEXTS = (
    *("DefaultCPUAllocator", "can't allocate memory", "not enough memory"),
    "backend out of memory",  # of Apple's GPUs
    "error: out of memory",  # of the driver of a GPU: a torch.AcceleratorError
    "_STATUS_ALLOC_FAILED",  # of cuBLAS, cuDNN and the like, which allocate by themselves
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory, on a device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
