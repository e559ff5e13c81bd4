"""Python in a process of its own, from the root of the repository."""

import os
import subprocess
import sys
from pathlib import Path


def run(*arguments: str, **environment: str) -> str:
    """What it has printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
