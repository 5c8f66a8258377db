"""Speeds that `jobs/calibrate.py` measured: read from its file, laid over a topology."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayrec.distributed.planner.presets import Device
from rayrec.distributed.planner.topology import CALIBRATION_VERSION, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a file of `jobs/calibrate.py` says.

    Args:
        path: the file.
        kind: "cpu" or "cuda": what was measured.
        speeds: fields of `presets.Device` by name.
    """

    path: str
    kind: str
    speeds: Mapping[str, float]

    @classmethod
    def read(cls, path: str | Path) -> Calibration:
        """The calibration in a file.

        Raises:
            ValueError: not such a file, of another version, or with figures that are unknown or not positive.
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
        known = set(Device.__dataclass_fields__) - {"kind", "memory_bytes", "host_bytes"}
        if unknown := set(speeds) - known:
            raise ValueError(f"{path}: unknown figures {sorted(unknown)}; known: {sorted(known)}")
        for name, value in speeds.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{path}: {name}={value} must be positive")
        return cls(path=str(path), kind=str(kind), speeds=speeds)

    def on(self, topology: Topology) -> Topology:
        """`topology` with the measured speeds.

        Raises:
            ValueError: they are of another kind of device.
        """
        if self.kind != topology.compute_device:
            raise ValueError(
                f"{self.path}: measured on {self.kind}, but the ranks have {topology.compute_device}; "
                f"run jobs/calibrate.py where they run"
            )
        return topology.with_device(replace(topology.device, **dict[str, Any](self.speeds)))
