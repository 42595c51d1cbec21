"""A mutant: a line of the package that is made wrong, and the tests that must notice."""

from typing import NamedTuple, Optional, Tuple


class Mutant(NamedTuple):
    """A mutant without `old` and `new` is still to be written.

    Attributes:
        name: the fault, in words.
        file: in src/macrobatch.
        old: a text that is in the file exactly once, lines included.
        new: the text instead.
        tests: of which at least one must fail; ids below tests/, as pytest takes them.
    """

    name: str
    file: str
    old: Optional[str]
    new: Optional[str]
    tests: Tuple[str, ...]


def waiting(name: str, *tests: str) -> Mutant:
    """A mutant in a room that is being rebuilt: its text is to be filled in."""
    return Mutant(name, "", None, None, tests)
