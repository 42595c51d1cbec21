"""Imports go one way, and each room keeps to itself. Reads the source only: no TensorFlow."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2] / "src" / "macrobatch"
FILES = {
    ".".join(("macrobatch", *path.relative_to(ROOT).with_suffix("").parts)): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__init__.py"
}

# Who may import whom. A room may always import from itself.
SHARED = {
    *("_types", "_engine", "_checks", "_internals", "_backends"),
    *("_optimizer_checks", "_loop_checks"),
}
MAY_IMPORT = {
    "_backends": {"_checks"},
    "_optimizer_checks": {"_internals"},
    "_loop_checks": {"_checks"},
    "_shown": {"_keras"},
    "_jax": {*SHARED, "_batches", "_keras", "_noise", "_shown", "_sizes", "_found_sizes"},
    "_torch": {*SHARED, "_batches", "_keras", "_noise", "_shown", "_sizes", "_found_sizes"},
    "_types": set(),
    "_engine": {"_types"},
    "_checks": set(),
    "_internals": set(),
    "_tensorflow": SHARED,
    "_batches": SHARED,
    "_keras": SHARED,
    "_found_sizes": {*SHARED, "_batches", "_keras", "_sizes"},
    "_noise": {*SHARED, "_tensorflow", "_keras"},
    "_meeting": {*SHARED, "_tensorflow", "_batches", "_keras"},
    "_own_steps": {*SHARED, "_tensorflow", "_batches", "_keras"},
    "_sizes": SHARED,
    "_workers": {*SHARED, "_tensorflow"},
    "_fit": {
        *SHARED,
        "_tensorflow",
        "_batches",
        "_keras",
        "_meeting",
        "_noise",
        "_own_steps",
        "_shown",
        "_workers",
        "_sizes",
    },
    "_gradient_accumulator": {*SHARED, "_tensorflow"},
    "_gradients": {*SHARED, "_tensorflow", "_batches", "_keras", "_meeting", "_sizes"},
    "_value_and_gradients": {
        *SHARED,
        "_tensorflow",
        "_batches",
        "_keras",
        "_gradients",
        "_meeting",
        "_noise",
        "_own_steps",
        "_sizes",
    },
    "_gradient_noise_scale": {*SHARED, "_keras", "_noise"},
    "_settings": {"_checks", "_keras"},
    "_accumulate": {*SHARED, "_batches", "_keras", "_settings", "_sizes"},
    "_no_trace": {*SHARED, "_batches", "_keras", "_accumulate"},
    "_verify": {
        *SHARED,
        *("_batches", "_keras", "_settings", "_accumulate", "_no_trace"),
    },
    "_plan": {
        *SHARED,
        *("_tensorflow", "_batches", "_keras", "_fit", "_sizes"),
        *("_settings", "_accumulate", "_no_trace"),
    },
    "_run": {
        *SHARED,
        *("_tensorflow", "_keras", "_fit", "_sizes", "_workers"),
        *("_accumulate", "_no_trace", "_verify"),
    },
    "cli": {"_workers", "_verify", "_plan", "_run"},
    "__main__": {"cli"},
}

# What runs on TensorFlow 1.14, where there is no Keras 3.
ON_TENSORFLOW_1 = {
    "_types",
    "_engine",
    "_checks",
    "_backends",
    "_optimizer_checks",
    "_internals.patch",
    "_internals.replaced",
    "_internals.models",
    "_internals.training",
    "_internals.copies",
    "_gradient_accumulator",
    "_tensorflow.graph",
    "_tensorflow.sums",
    "_tensorflow.replicas",
    "_tensorflow.update",
    "_tensorflow.window",
    "_tensorflow.window_checks",
    "_tensorflow.checks",
}

# Names with an underscore that are not private names of somebody else.
OWN_OR_PUBLIC = {"_replace", "_fields", "_getframe", "_exit"}


def imports_of(path):
    """The modules that a file imports when it is imported."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def at_import_time(path):
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            yield from ([module] if module else [name.name for name in node.names])


def room_of(module):
    return module.split(".")[1] if module.count(".") else None


@pytest.mark.parametrize("module", FILES)
def test_imports_go_one_way(module):
    room = room_of(module)
    for imported in imports_of(FILES[module]):
        if imported.startswith("macrobatch.") and imported.split(".")[1] != "__version__":
            other = room_of(imported)
            assert other == room or other in MAY_IMPORT[room], f"{module} imports {imported}"


@pytest.mark.parametrize("module", [m for m in FILES if room_of(m) in ("_keras", "_batches")])
def test_arithmetic_and_batches_know_no_backend(module):
    backends = ("tensorflow", "jax", "torch", "numpy")
    assert not [name for name in imports_of(FILES[module]) if name.split(".")[0] in backends]


@pytest.mark.parametrize("module", [m for m in FILES if room_of(m) == "_tensorflow"])
def test_the_engine_knows_no_keras(module):
    assert not [name for name in imports_of(FILES[module]) if name.split(".")[0] == "keras"]


@pytest.mark.parametrize("module", FILES)
def test_each_backend_is_in_its_engine_only(module):
    engines = {"_jax": "jax", "_torch": "torch"}
    imported = {name.split(".")[0] for name in imports_of(FILES[module])}
    others = {"tensorflow", *engines.values()} - {engines.get(room_of(module))}
    if room_of(module) not in engines:
        others -= {"tensorflow"}
    assert not imported & others


# What `accumulate` needs before it knows the backend.
NEUTRAL = [
    *(
        "_accumulate",
        "_settings",
        "_batches",
        "_keras",
        "_sizes",
        "_found_sizes",
        "_no_trace",
        "_verify",
    ),
    *("_checks", "_backends", "_types", "_engine", "_internals"),
]


@pytest.mark.parametrize("module", [m for m in FILES if room_of(m) in NEUTRAL])
def test_the_way_in_imports_no_backend(module):
    imported = {name.split(".")[0] for name in at_import_time(FILES[module])}
    assert not imported & {"tensorflow", "jax", "torch"}


@pytest.mark.parametrize("module", [m for m in FILES if room_of(m) == "_sizes"])
def test_sizes_know_no_backend_and_no_keras(module):
    imported = {each.split(".")[0] for each in imports_of(FILES[module])}
    assert not {"tensorflow", "jax", "torch", "keras"} & imported


@pytest.mark.parametrize("name", ["checks", "host", "scale"])
def test_a_noise_scale_on_any_backend_knows_no_tensorflow(name):
    imported = list(imports_of(FILES[f"macrobatch._noise.{name}"]))
    assert not [each for each in imported if "tensorflow" in each or "meter" in each]


@pytest.mark.parametrize("name", sorted(ON_TENSORFLOW_1))
def test_what_runs_on_tensorflow_1_imports_nothing_newer(name):
    for imported in at_import_time(FILES[f"macrobatch.{name}"]):
        assert imported.split(".")[0] != "keras"
        if imported.startswith("macrobatch."):
            inner = imported[len("macrobatch.") :]
            assert inner in ON_TENSORFLOW_1 or inner in ("_internals", "_tensorflow"), imported


@pytest.mark.parametrize("module", [m for m in FILES if m.split(".")[1] != "_internals"])
def test_private_names_of_others_are_in_one_room(module):
    tree = ast.parse(FILES[module].read_text())
    own = {
        node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        is_dunder = node.attr.startswith("__") and node.attr.endswith("__")
        of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not (is_dunder or of_self or node.attr in own | OWN_OR_PUBLIC):
            raise AssertionError(f"{module}:{node.lineno}: {node.attr}")


def test_rooms_start_with_what_they_are_for_and_are_small():
    for module, path in FILES.items():
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), module
        assert len(text.splitlines()) <= 340, module
