# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser, where one is installed (Debian's package ``chromium``)."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.evaluation.test_report import RECORDS, SETUP

from sphkv.cli.main import main
from sphkv.evaluation.records import RecordFile

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")

# Runs inside the page after its own script: switches one method off and says how wide it all is.
PROBE = """
<script>
const box = [...document.querySelectorAll('.keys input')].find((one) => one.value === 'ours');
box.click();
const parts = [...document.querySelectorAll('.series')];
const hidden = parts.filter((part) => part.style.display === 'none');
document.body.dataset.hidden = hidden.length;
document.body.dataset.ours = parts.filter((part) => part.dataset.method === 'ours').length;
document.body.dataset.wider = document.documentElement.scrollWidth - window.innerWidth;
document.body.dataset.paper = getComputedStyle(document.body).backgroundColor;
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    with RecordFile(folder / "records.jsonl") as file:
        file.begin_run(SETUP)
        for entry in RECORDS:
            file.append(entry)
    assert main(["report", str(folder / "records.jsonl"), "--out", str(folder)]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    probed = folder / "probed.html"
    probed.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    return probed


def visit(page: Path, *flags: str) -> tuple[str, str]:
    """The page's DOM after its scripts, and what the browser logged."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom",
            f"--user-data-dir={page.parent / 'profile'}", *flags, page.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout, done.stderr


def number(dom: str, name: str) -> int:
    """A number that the page wrote into one of its attributes."""
    found = re.search(rf'data-{name}="(-?\d+)"', dom)
    assert found is not None, f"no data-{name} in the page"
    return int(found[1])


def test_content_switches_and_console(page):
    dom, log = visit(page)
    for heading in ("Frontiers at equal quality", "Tier map", "Stability phase diagram"):
        assert f"<h2>{heading}</h2>" in dom
    assert number(dom, "hidden") == number(dom, "ours") > 0
    assert "CONSOLE" not in log


def test_a_phone_needs_no_sideways_scrolling_and_dark_is_dark(page):
    light, _ = visit(page, "--window-size=500,900")
    dark, log = visit(page, "--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    assert number(light, "wider") <= 0
    assert 'data-paper="rgb(255, 255, 255)"' in light
    assert 'data-paper="rgb(20, 24, 31)"' in dark
    assert "CONSOLE" not in log
