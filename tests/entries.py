"""Golden files of short entries: a title, lines of code, and what comes of their values."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENTRY = re.compile(r"# (.+)\n((?:    .+\n)+)(.+)\n")


class Entries:
    """A file of ``tests/golden``; ``--update-golden`` writes what comes of the code.

    The code may use `names`, such as the globals of the test.
    """

    def __init__(self, file: str, names: dict[str, Any]) -> None:
        self.file, self.names = Path(__file__).parent / "golden" / file, names
        text = self.file.read_text()
        self.titles = [entry[1] for entry in ENTRY.finditer(text)]
        assert len(set(self.titles)) == len(re.findall("^# ", text, re.M)), "all are read"

    def check(self, title: str, tell: Callable[..., str], update: bool) -> None:
        """Compare with what `tell` says of the values of an entry's lines."""
        text = self.file.read_text()
        (entry,) = [entry for entry in ENTRY.finditer(text) if entry[1] == title]
        told = tell(*(eval(line, self.names) for line in entry[2].splitlines()))
        if update:
            self.file.write_text(text[: entry.start(3)] + told + text[entry.end(3) :])
        else:
            assert told == entry[3]
