"""Which id has which row of a table whose ids come and go. README.md has the rule.

Names are imported on first use: only `rounds.py` needs torch.

| file | holds |
|---|---|
| `config.py` | `DynamicIds`: what a user says about a table |
| `layout.py` | `Layout`: the bucket, rank and fallback row of an id |
| `clock.py` | the clock of a step, from the event times of all ranks |
| `loops.py` | the rule of a step, compiled: the definition |
| `id_map.py` | `IdMap`: the state of the buckets that a rank owns |
| `rounds.py` | `DeviceIdMap`: the same rule as operations on tensors, for CUDA |
| `resizing.py` | other numbers of rows, and maps made from a vocabulary |
| `exported.py` | the file that evaluation, services and C++ read |
| `table_maps.py` | the maps of a model's tables on one of many ranks: exchanges of a step, state |
| `initial.py` | first weights of an id's row |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec._runtime.imports import lazy_names

if TYPE_CHECKING:
    from rayrec.dynamic_ids.clock import advance, newest_times
    from rayrec.dynamic_ids.config import DynamicIds, Evict
    from rayrec.dynamic_ids.exported import ExportedIds, export
    from rayrec.dynamic_ids.id_map import Changes, IdMap, Listing, Mapped
    from rayrec.dynamic_ids.initial import first_weights, row_seeds
    from rayrec.dynamic_ids.layout import EMPTY, EMPTY_IN_FIRST, HASHED, ZERO, Layout, unmix
    from rayrec.dynamic_ids.resizing import cut, grown, joined, map_of, resized
    from rayrec.dynamic_ids.rounds import DeviceIdMap
    from rayrec.dynamic_ids.table_maps import Fresh, SavedRange, SharedMap, TableMaps, connected

__getattr__ = lazy_names(__name__)

__all__ = [
    "EMPTY",
    "EMPTY_IN_FIRST",
    "HASHED",
    "ZERO",
    "Changes",
    "DeviceIdMap",
    "DynamicIds",
    "Evict",
    "ExportedIds",
    "Fresh",
    "IdMap",
    "Layout",
    "Listing",
    "Mapped",
    "SavedRange",
    "SharedMap",
    "TableMaps",
    "advance",
    "connected",
    "cut",
    "export",
    "first_weights",
    "grown",
    "joined",
    "map_of",
    "newest_times",
    "resized",
    "row_seeds",
    "unmix",
]
