"""The cases of TensorFlow on the backend of this environment: the same models, the same 1e-10."""

import loss_cases
import model_cases
import pytest
from support import BACKEND, MODES, thorough

# torch.compile warns of itself. What it may lose of a model runs as it is, which is said.
OF_COMPILER = [
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore:Dynamo detected a call",
    "ignore:jit_compile=True has no effect",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:If `run_eagerly` is True",
]


def parameters(cases):
    for name, case in cases.items():
        if BACKEND not in case.backends.split():
            continue
        for mode in MODES:
            filters = [*case.filters, *(OF_COMPILER if mode == "compiled" else [])]
            marks = [pytest.mark.filterwarnings(each) for each in filters]
            marks += [] if case.is_quick_elsewhere(mode) else [thorough]
            yield pytest.param(case, mode, id=f"{name}-{mode}", marks=marks)


@pytest.mark.parametrize(("case", "mode"), list(parameters(loss_cases.CASES)))
def test_losses(case, mode, monkeypatch):
    case.check(mode, monkeypatch)


@pytest.mark.parametrize(("case", "mode"), list(parameters(model_cases.CASES)))
def test_models(case, mode, monkeypatch):
    case.check(mode, monkeypatch)
