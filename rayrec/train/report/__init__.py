"""`write_report`: the page people look at, beside the run's other files.

`run.py` reads a run folder, `page.py` lays it out, `svg.py` draws.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from rayrec.train.errors import StorageError
from rayrec.train.report.page import page
from rayrec.train.report.run import read_run


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` from what the run folder holds so far; works while the run goes on, and after it failed.

    Args:
        run_dir: `<storage path>/<name>`, with any of config.yaml, plan.json, metrics.jsonl and result.json.

    Returns:
        The path of the report. It replaces an earlier one at once, so a reader never sees half a page.

    Raises:
        ValueError: `run_dir` is not a run folder, or the report cannot be written there.
    """
    run_dir = Path(run_dir)
    report = run_dir / "report.html"
    text = page(read_run(run_dir), time.time())
    partial = run_dir / f".report-{os.getpid()}.html"
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(report)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StorageError(f"report {report}: cannot be written ({error.strerror or error})") from error
    return report
