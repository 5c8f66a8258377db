"""The HTML report of a run.

`run.py` reads the run folder, `page.py` builds the page, `svg.py` draws the charts, `runs.py` lists and compares runs.
"""

from __future__ import annotations

import time
from pathlib import Path

from rayrec.train.errors import StorageError
from rayrec.train.report.page import page
from rayrec.train.report.run import read_run
from rayrec.train.run.folder import write_atomically


def write_report(run_dir: Path) -> Path:
    """Write `report.html` from the files in the run folder. Also works for a running or failed run.

    Args:
        run_dir: `<storage path>/<name>`, with any of config.yaml, plan.json, metrics.jsonl and result.json.

    Returns:
        The path of the report. An earlier report is replaced atomically.

    Raises:
        ValueError: `run_dir` is not a run folder, or the report cannot be written there.
    """
    report = Path(run_dir) / "report.html"
    text = page(read_run(Path(run_dir)), time.time())
    try:
        write_atomically(report, text)
    except OSError as error:
        raise StorageError(f"report {report}: cannot be written ({error.strerror or error})") from error
    return report
