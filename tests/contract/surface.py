"""The public surface of the package as data: what users write, and what they get back.

    python tests/contract/surface.py > tests/contract/surface.json

takes down what there is now. `test_surface.py` compares. A line that goes or changes breaks
somebody's program: it needs a way for old programs to go on, and a line in the changelog.
"""

import ast
import contextlib
import importlib.metadata
import inspect
import io
import json
import os
import pathlib
import re
import typing

import macrobatch
from macrobatch import cli

# Members without an underscore that are no promise: other rooms of the package call them.
INTERNAL = ("GradientNoiseScale.meter", "GradientNoiseScale.restart")
PACKAGE = pathlib.Path(macrobatch.__file__).parent


def surface():
    """Everything; on JAX and torch, without the functions that these have not."""
    classes, functions = found()
    return {
        "names": dir(macrobatch),
        "hooks": sorted(n for n in vars(macrobatch) if n.endswith("_ipython_extension")),
        "script": [f"{each.name}={each.value}" for each in scripts()],
        "signatures": functions,
        "values": classes,
        "commands": {name: flags(name) for name in ("", "run", "verify", "plan")},
        "environment": sorted(set(environment())),
    }


def scripts():
    found = importlib.metadata.entry_points(group="console_scripts")
    return [each for each in found if each.value.startswith("macrobatch.")]


def found():
    """Attributes by class, and signatures: of what is public, and of classes that it returns."""
    attributes, signatures, waiting = {}, {}, []
    for name in macrobatch.__all__:
        with contextlib.suppress(ImportError):  # this backend does not have it
            waiting.append((name, getattr(macrobatch, name)))
    while waiting:
        name, value = waiting.pop()
        if name in attributes:
            continue
        hints = typing.get_type_hints(value)
        if inspect.isclass(value):
            routines = {f"{name}.{each}" for each in members(value, inspect.isroutine)}
            signatures.update(
                (each, signature(getattr(value, each.partition(".")[2])))
                for each in routines.difference(INTERNAL)
            )
            attributes[name] = sorted(members(value, lambda each: not inspect.isroutine(each)))
        else:
            hints = {"return": hints.get("return")}
        if name in macrobatch.__all__:  # nobody else calls the classes of results
            signatures[name] = signature(value)
        waiting += [(cls.__name__, cls) for hint in hints.values() for cls in classes_in(hint)]
    return dict(sorted(attributes.items())), dict(sorted(signatures.items()))


def signature(value):
    """Parameters with their kinds and defaults. Types may become narrower or wider."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return f"a {value.__mro__[1].__name__}"
    made, empty = inspect.signature(value), inspect.Parameter.empty
    parameters = [each.replace(annotation=empty) for each in made.parameters.values()]
    return str(made.replace(parameters=parameters, return_annotation=empty))


def members(cls, is_wanted):
    """Public names that the package adds to a class: what other packages have in it is theirs."""
    others = {name for base in cls.__mro__ if not is_ours(base) for name in vars(base)}
    for base in filter(is_ours, cls.__mro__):
        for name in {*vars(base), *getattr(base, "__annotations__", {})} - others:
            if not name.startswith("_") and is_wanted(getattr(base, name, None)):
                yield name


def is_ours(cls):
    return cls.__module__.split(".")[0] == "macrobatch"


def classes_in(hint):
    """The classes of the package in a type: Report in Optional[Report]."""
    if inspect.isclass(hint) and is_ours(hint):
        yield hint
    for each in typing.get_args(hint):
        yield from classes_in(each)


def flags(command):
    """The options of a command with their values, as its help shows them."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        cli.main([command, "--help"] if command else ["--help"])
    return re.findall(r"^  (-[^\s,]+(?:, --?\S+)?(?: [A-Z{]\S*)?)(?:  |$)", output.getvalue(), re.M)


def environment():
    """The environment variables that the package reads or sets, wherever it names them."""
    known = r"(MACROBATCH|KERAS|TF|CUDA|XLA|JAX|PYTORCH)_[A-Z_]+|TERM"
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and re.fullmatch(known, str(node.value)):
                yield node.value


if __name__ == "__main__":
    os.environ["COLUMNS"] = "120"
    print(json.dumps(surface(), indent=2))
