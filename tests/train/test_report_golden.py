"""The report page of one fixed run, mark by mark, as it was when a person last looked at it.

After a change that is meant: `python -m tests.train.test_report_golden` writes `golden_report.html` anew; look at the
page of a run, and let the file's diff go into the review.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from rayrec.train.report import write_report
from tests.train.test_report import full_run

GOLDEN = Path(__file__).with_name("golden_report.html")


def page(folder: Path) -> str:
    """One tag a line; without style, script, and what says where and when it was written."""
    text = write_report(full_run(folder / "first")).read_text()
    text = re.sub(r"<(style|script)[^>]*>.*?</\1>|<footer>.*?</footer>", "", text, flags=re.DOTALL)
    return re.sub(r">\s*<", ">\n<", text)


def test_the_page_is_as_it_was(tmp_path: Path) -> None:
    assert page(tmp_path) == GOLDEN.read_text(), "if it is meant: python -m tests.train.test_report_golden"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(page(Path(folder)), encoding="utf-8")
