"""Private names of the package that tests of behaviour need: the only place for them.

The check whether examples interact can be left out, because it takes time. Memory can be made to
look as it does elsewhere: on a GPU, where a step that runs out is an error, or on a machine that
has so much of it.
"""

import importlib

import keras

from macrobatch._sizes import limit
from macrobatch._sizes.peaks import ProcessCounter

BACKEND = keras.backend.backend()

if BACKEND == "tensorflow":
    from macrobatch._fit.meeting import Meeting
else:
    from macrobatch._keras.first_batch import FirstBatch


def skip_interaction_check(monkeypatch):
    """Leaves out the check of `fit` whether examples interact."""
    if BACKEND == "tensorflow":
        monkeypatch.setattr(Meeting, "start", lambda self: None)
        monkeypatch.setattr(Meeting, "watching", lambda self, step: step)
    else:
        monkeypatch.setattr(FirstBatch, "is_due", property(lambda self: False))


def make_running_out_an_error(monkeypatch, compiled=True):
    """Running out of memory is an error, as on a GPU; or only outside of what XLA compiles."""
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: True)
    if compiled and BACKEND != "torch":
        room = "_jax" if BACKEND == "jax" else "_fit"
        monkeypatch.setattr(f"macrobatch.{room}.auto.Auto.host_raises", True)


def count_memory(monkeypatch, counter):
    """A counter counts the memory of this process, and running out of it is no error."""
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: on_gpu)
    monkeypatch.setattr(ProcessCounter, "__init__", lambda self: None)
    can_reset = property(lambda self: counter.can_reset)
    monkeypatch.setattr(ProcessCounter, "can_reset", can_reset, raising=False)
    for name in ("reset", "read", "now"):
        monkeypatch.setattr(ProcessCounter, name, getattr(counter, name))


def make_available(monkeypatch, size):
    """This process may have so many bytes of memory, and others have the rest."""
    found = limit.Limit(int(size), "the machine has it, less what others use")
    monkeypatch.setattr(limit, "available", lambda machine=limit.THIS: found)


def pretend_gpus(monkeypatch, gpus):
    """A backend computes on these GPUs, which are as it tells of them."""
    room = {"tensorflow": "_tensorflow", "jax": "_jax", "torch": "_torch"}[BACKEND]
    module = importlib.import_module(f"macrobatch.{room}.device_memory")
    monkeypatch.setattr(module, "gpus", lambda: gpus)
