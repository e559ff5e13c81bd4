"""Start an example as a user does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(
    script: str, processes: int, arguments: list[str], where: Path
) -> subprocess.CompletedProcess[str]:
    """Run a script of the examples; 0 processes: by python itself, without torchrun."""
    command = [sys.executable]
    if processes:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes)]
    return subprocess.run(
        [*command, str(ROOT / "examples" / script), *arguments],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
