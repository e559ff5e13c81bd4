"""Memory reports."""

import subprocess
import sys

import pytest
import torch

from slapo.utils.report import report_memory


def test_the_report_is_logged_and_returned(caplog: pytest.LogCaptureFixture) -> None:
    report = report_memory("after build", device="cpu")
    assert report.rss is not None
    assert report.peak_rss is not None
    # An interpreter with torch takes tens of megabytes at least, and a test not a terabyte.
    assert 2**25 < report.rss < 2**40
    assert report.peak_rss >= 2**25
    assert report.device is None
    assert report.allocated is None
    (record,) = caplog.records
    assert record.message == f"after build: {report}"
    assert "GiB (peak " in record.message


def test_without_a_message_there_is_no_colon_in_front(caplog: pytest.LogCaptureFixture) -> None:
    report_memory(device="cpu")
    assert caplog.messages[0].startswith("process ")


def test_other_ranks_stay_silent(caplog: pytest.LogCaptureFixture) -> None:
    assert report_memory("elsewhere", ranks=1).rss
    assert not caplog.records


def test_memory_that_grows_shows() -> None:
    before = report_memory(device="cpu").rss
    block = torch.ones(2**26)
    after = report_memory(device="cpu").rss
    assert before is not None
    assert after is not None
    assert after - before > 0.5 * block.nbytes


def test_the_peak_is_that_of_this_process_alone() -> None:
    block = torch.ones(2**28)  # 1 GiB, which a process that is started here does not have
    code = "from slapo.utils.report import report_memory as r; m = r(); print(m.rss, m.peak_rss)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rss, peak = map(int, done.stdout.split())
    assert rss <= peak < block.nbytes


def test_a_device_that_is_not_there() -> None:
    present = torch.accelerator.current_accelerator(check_available=True)
    absent = "xpu" if present is None or present.type != "xpu" else "cuda"
    with pytest.raises(ValueError, match=f"there is no device {absent} here"):
        report_memory(device=absent)


@pytest.mark.gpu
def test_the_accelerator_is_in_the_report() -> None:
    before = report_memory()
    block = torch.ones(2**20, device=before.device)
    after = report_memory()
    assert after.allocated is not None
    assert before.allocated is not None
    assert after.allocated - before.allocated >= block.nbytes
    assert f"{after.device}" in str(after)
