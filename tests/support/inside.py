"""Private names of the package that tests of behaviour need: the only place for them.

The check whether examples interact can be left out, because it takes time. Memory can be made to
look as it does on a GPU, where a step that runs out is an error.
"""

import keras

from macrobatch._sizes import limit

if keras.backend.backend() == "tensorflow":
    from macrobatch._fit.meeting import Meeting
else:
    from macrobatch._keras.first_batch import FirstBatch


def skip_interaction_check(monkeypatch):
    """Leaves out the check of `fit` whether examples interact."""
    if keras.backend.backend() == "tensorflow":
        monkeypatch.setattr(Meeting, "start", lambda self: None)
        monkeypatch.setattr(Meeting, "watching", lambda self, step: step)
    else:
        monkeypatch.setattr(FirstBatch, "is_due", property(lambda self: False))


def make_running_out_an_error(monkeypatch):
    """Running out of memory is an error, as on a GPU."""
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: True)
    if keras.backend.backend() == "jax":
        from macrobatch._jax.auto import Auto

        monkeypatch.setattr(Auto, "host_raises", True)
