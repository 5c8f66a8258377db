"""The file that `jobs/calibrate.py` writes: measured speeds of a machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rayrec.distributed.planner.machine.devices import Device

CALIBRATION_VERSION = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Content of a calibration file; apply it by `Topology.with_calibration`.

    Args:
        path: the file.
        kind: measured device: "cpu" or "cuda".
        speeds: measured fields of `Device`, by name.
    """

    path: str
    kind: str
    speeds: Mapping[str, float]

    @classmethod
    def read(cls, path: str | Path) -> Calibration:
        """Reads a calibration file.

        Raises:
            ValueError: not a calibration file, another version, or figures that are unknown or not positive.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            version, kind, speeds = data["version"], data["compute_device"], dict(data["measured"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a calibration file ({error}); write one with jobs/calibrate.py") from error
        if version != CALIBRATION_VERSION:
            raise ValueError(
                f"{path}: calibration version {version!r}; this rayrec reads {CALIBRATION_VERSION}; "
                "write it again with jobs/calibrate.py"
            )
        field_names = set(Device.__dataclass_fields__) - {"kind", "memory_bytes", "host_bytes"}
        if unknown := set(speeds) - field_names:
            raise ValueError(f"{path}: unknown figures {sorted(unknown)}; known: {sorted(field_names)}")
        for name, value in speeds.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{path}: {name}={value} must be positive")
        return cls(path=str(path), kind=str(kind), speeds=speeds)
