"""The cases of TensorFlow on the backend of this environment: the same models, the same 1e-10."""

import loss_cases
import model_cases
import pytest
from support import BACKEND, MODES, thorough

# Cases that run in all modes of a backend, not in the first one only.
IN_ALL_MODES = {
    "reduction-mean_with_sample_weight-weights",
    "mask-sum_over_batch_size",
    "outputs-dict",
    "regularizers",
    "optimizer-adam",
    "subclassed",
    "repeated-rows-adam",
}
# torch takes minutes to compile some of the others, and so does JAX, which compiles operations one
# by one in eager mode.
SLOW = {
    ("torch", "compiled"): {"optimizer-adam", "subclassed"},
    ("jax", "eager"): {"subclassed"},
    ("jax", "not-compiled"): {"regularizers"},
}
# Optimizers see a gradient, whatever it comes from: one of each kind is enough for every day.
QUICK = ("adam", "clipnorm", "ema", "global_clipnorm", "loss_scale", "schedule")


# torch.compile warns of itself. What it may lose of a model runs as it is, which is said.
OF_COMPILER = [
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore:Dynamo detected a call",
    "ignore:jit_compile=True has no effect",
]


def parameters(cases):
    for name, case in cases.items():
        if BACKEND not in case.backends.split():
            continue
        for place, mode in enumerate(MODES):
            optimizer = name.split("optimizer-")[-1] if name.startswith("optimizer-") else "adam"
            is_quick = place == 0 and optimizer in QUICK
            # JAX compiles each model, which takes seconds: for every day, what has a quick graph.
            is_quick &= BACKEND != "jax" or not {"graph", "compiled"}.isdisjoint(case.quick.split())
            is_quick |= name in IN_ALL_MODES
            if (BACKEND, mode) in SLOW:
                is_quick = name in SLOW[BACKEND, mode]
            filters = [*case.filters, *(OF_COMPILER if mode == "compiled" else [])]
            marks = [pytest.mark.filterwarnings(each) for each in filters]
            marks += [] if is_quick else [thorough]
            yield pytest.param(case, mode, id=f"{name}-{mode}", marks=marks)


@pytest.mark.parametrize(("case", "mode"), list(parameters(loss_cases.CASES)))
def test_losses(case, mode, monkeypatch):
    case.check(mode, monkeypatch)


@pytest.mark.parametrize(("case", "mode"), list(parameters(model_cases.CASES)))
def test_models(case, mode, monkeypatch):
    case.check(mode, monkeypatch)
