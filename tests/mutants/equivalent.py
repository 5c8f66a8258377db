"""Faults that change nothing a test could see, by file and change, each with the reason."""

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "rayrec/checkpoint/polling.py",
        "`raise _worst(failures) from (errors[0] if errors else None)` → "
        "`raise _worst(failures) from (errors[ -1] if errors else None)`",
    ): "a rank's list of errors has at most one",
    (
        "rayrec/distributed/planner/refusal.py",
        "`return min((option.piece_bytes for option in options), default=0.0)` → "
        "`return min((option.piece_bytes for option in options), default= -1.0)`",
    ): "of a table without options it is only compared with a rank's room, which is not negative",
    (
        "rayrec/distributed/planner/build.py",
        "`left_R = np.maximum(0.0, problem.room_R - packing.device_R)` → "
        "`left_R = np.maximum( -1.0, problem.room_R - packing.device_R)`",
    ): "a packing fits; what rounding takes below 0 is lost where the share is cut to hundredths and kept from falling",
    (
        "rayrec/distributed/planner/packing.py",
        "`score = score + memory_weight * device / np.maximum(problem.room_R, 1.0)` → "
        "`score = score + memory_weight * device / np.maximum(problem.room_R, 2.0)`",
    ): "a rank with room for less than two bytes is full, and its score infinite",
    (
        "rayrec/distributed/planner/proposers.py",
        "`self._best, self._worse = math.inf, 0` → `self._best, self._worse = math.inf, 1`",
    ): "the first rating is below infinity, which sets the count to 0",
    (
        "rayrec/distributed/sharding/tiers.py",
        "`return torch.cat([part for _, part in sorted(zip(self.sources, parts, strict=True), key=lambda pair: "
        "pair[0])])` → `return torch.cat([part for _, part in sorted(zip(self.sources, parts, strict=False), "
        "key=lambda pair: pair[0])])`",
    ): "the rows were split into as many parts as there are sources",
    (
        "rayrec/distributed/train_pipeline/train_pipelines.py",
        "`enable_inplace_copy_batch: bool = False,` → `enable_inplace_copy_batch: bool = True,`",
    ): "the argument is taken for TorchRec's sake and not read",
    (
        "rayrec/train/report/svg.py",
        "`(step, value) = trend[0]` → `(step, value) = trend[ -1]`",
    ): "the trend has one point",
    (
        "rayrec/distributed/planner/bound.py",
        "`if high <= low:` → `if high < low:`",
    ): "where both are equal the bisection ends after one round with the same number",
    (
        "rayrec/distributed/planner/options.py",
        "`yield kernel, 1.0, 1.0` → `yield kernel, 2.0, 1.0`",
    ): "a kernel without a cache reads no share of one",
}
