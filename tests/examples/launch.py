"""Start an example as a user does, or in processes that have imported torch already."""

import subprocess
import sys
from pathlib import Path

from tests.distributed import run_script

ROOT = Path(__file__).parents[2]


def start(
    script: str, processes: int, arguments: list[str], where: Path, by_torchrun: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a script of the examples; 0 processes: as python itself does."""
    path = ROOT / "examples" / script
    if not by_torchrun:
        return run_script(path, arguments, processes, where)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", str(processes), str(path), *arguments],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
