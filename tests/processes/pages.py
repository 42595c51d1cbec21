"""Blocks of code on a page of documentation."""

import re
from typing import NamedTuple

# A line before a block may say more: <!-- thorough --> or <!-- not run: why -->.
_BLOCK = re.compile(r"(?:^<!-- (thorough|not run: .+?) -->\n)?^```(\w+)\n(.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    line: int
    mark: str
    language: str
    code: str

    @property
    def runs(self):
        return self.language == "python" and not self.mark.startswith("not run")


def blocks_of(text):
    for found in _BLOCK.finditer(text):
        mark, language, code = found.groups()
        yield Block(text.count("\n", 0, found.start(3)) + 1, mark or "", language, code)
