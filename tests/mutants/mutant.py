"""A mutant: a line of the package that is made wrong, and the tests that must notice."""

from typing import NamedTuple, Tuple


class Mutant(NamedTuple):
    """A mutant.

    Attributes:
        name: the fault, in words.
        file: in src/macrobatch.
        old: a text that is in the file exactly once, lines included.
        new: the text instead.
        tests: of which at least one must fail; ids below tests/, as pytest takes them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: Tuple[str, ...]
