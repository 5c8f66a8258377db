"""`write_report`: the page people look at, beside the run's other files.

`run.py` reads a run folder, `page.py` lays it out, `svg.py` draws.
"""

from __future__ import annotations

import time
from pathlib import Path

from rayrec.train.errors import StorageError
from rayrec.train.report.page import page
from rayrec.train.report.run import read_run
from rayrec.train.run.folder import write_atomically


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` from what the run folder holds so far; works while the run goes on, and after it failed.

    Args:
        run_dir: `<storage path>/<name>`, with any of config.yaml, plan.json, metrics.jsonl and result.json.

    Returns:
        The path of the report. It replaces an earlier one at once, so a reader never sees half a page.

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
