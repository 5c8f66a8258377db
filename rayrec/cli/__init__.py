"""The command line: `rayrec train`, `evaluate`, `plan`, `report`, `config`; each a thin call of the library."""

from rayrec.cli.app import app, main, run

__all__ = ["app", "main", "run"]
