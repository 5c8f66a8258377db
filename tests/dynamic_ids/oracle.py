"""The rule of a step in plain Python: a dictionary from row to (id, count, last seen)."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from rayrec.dynamic_ids import DynamicIds, Evict

M = 2**64 - 1


def mixed(number: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        number = (number ^ number >> 33) * factor & M
    return number ^ number >> 33


class Oracle:
    def __init__(self, config: DynamicIds) -> None:
        self.config, self.layout, self.clock = config, config.layout, 0
        self.rows: dict[int, tuple[int, int, int]] = {}
        self.cells: dict[int, Counter[int]] = defaultdict(Counter)
        self.sighted: Counter[int] = Counter()

    def fresh(self, seen: int) -> bool:
        return self.config.ttl_s is None or self.clock - seen <= self.config.ttl_s

    def rank(self, count: int, seen: int) -> tuple[int, int]:
        return (seen, count) if self.config.evict is Evict.LRU else (self.decayed(count, seen), seen)

    def decayed(self, count: int, seen: int) -> int:
        half_life = self.config.half_life_s
        return count if half_life is None else count >> (self.clock // half_life - seen // half_life)

    def step(self, ids: list[int], clock: int) -> tuple[dict[int, int], list[tuple[int, int | None, int | None]]]:
        """The row of each id, and the changes (row, id that left, id that came)."""
        self.clock, counts, changes = max(self.clock, clock), Counter(ids), []
        row_of = {key: row for row, (key, _, seen) in self.rows.items() if self.fresh(seen) and key in counts}
        for key, row in row_of.items():
            _, count, seen = self.rows[row]
            self.rows[row] = key, min(self.decayed(count, seen) + counts[key], 2**31 - 1), self.clock
        held = set(row_of.values())
        for row, (key, _, _) in list(self.rows.items()):
            if key in counts and row not in held:  # expired
                del self.rows[row]
                changes.append((row, key, None))
        asking = defaultdict(list)
        for key in sorted(counts.keys() - row_of.keys(), key=lambda key: mixed(key & M)):
            asking[int(self.layout.bucket([key])[0])].append(key)
            row_of[key] = int(self.layout.fallback_row([key])[0])
        for bucket, keys in asking.items():
            admitted = sorted(self.admitted(bucket, keys, counts), key=lambda pair: -pair[1])
            first, ages = bucket * self.layout.bucket_rows, self.config.evict is Evict.LFU_AGED
            for key, count in admitted:
                own = range(first, first + self.layout.own_rows)
                free = [row for row in own if row not in self.rows or not self.fresh(self.rows[row][2])]
                usual = [row for row in own if row in self.rows and row not in held and row not in free]
                least = min(usual, key=lambda row: self.rank(*self.rows[row][1:]), default=None)
                if not free and (least is None or self.rank(*self.rows[least][1:]) >= self.rank(count, self.clock)):
                    if ages and least is not None:
                        kept, old, seen = self.rows[least]
                        self.rows[least] = kept, max(old - count, 1), seen
                        held.add(least)
                    continue
                row = free[0] if free else least
                changes.append((row, self.rows[row][0] if row in self.rows else None, key))
                self.rows[row], row_of[key] = (key, count, self.clock), row
                held.add(row)
        return row_of, changes

    def admitted(self, bucket: int, keys: list[int], counts: Counter[int]) -> list[tuple[int, int]]:
        """The admitted ids with their counts so far."""
        config, sighted = self.config, self.sighted[bucket]
        self.sighted[bucket] += len(keys)
        if config.min_count > 1:
            size, cells = 3 * self.layout.bucket_rows, self.cells[bucket]
            if sighted >= self.layout.bucket_rows * config.min_count // 4:
                self.sighted[bucket] = len(keys)
                for cell in cells:
                    cells[cell] >>= 1
            mine = {k: [(mixed(mixed(k & M) ^ 0xFF51AFD7ED558CCD) >> 16 * n & 65535) * size >> 16 for n in range(4)]
                    for k in keys}  # fmt: skip
            want = {key: min(min(cells[cell] for cell in mine[key]) + counts[key], 255) for key in keys}
            for key in keys:
                cells.update({cell: max(0, want[key] - cells[cell]) for cell in set(mine[key])})
            return [(key, max(want[key], counts[key])) for key in keys if want[key] >= config.min_count]
        if config.probability < 1:
            seed = mixed((config.seed & M) ^ mixed(sighted + 1))
            chance = np.round((1 - (1 - config.probability) ** np.arange(256)) * 2**32)
            keys = [k for k in keys if mixed(mixed(k & M) ^ seed) >> 32 < chance[min(counts[k], 255)]]
        return [(key, counts[key]) for key in keys]
