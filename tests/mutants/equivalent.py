"""Faults that change nothing a test could see, by file and change, each with the reason.

Some kinds stand on many lines and are named once: what they change saves memory or time, or checks what holds anyway.
"""

from __future__ import annotations

KINDS = {
    ("frozen=True, slots=True", "frozen=True, slots=False"): "slots save memory; what is frozen takes no other field",
    ("if TYPE_CHECKING:", "if not TYPE_CHECKING:"): "what types alone need is imported at run time too",
    (", strict=True)", ", strict=False)"): "both sides of the zip are made as long as each other; it only checks that",
}
OF_ANY_LENGTH = (  # zips of what a caller or a file says: their check is tested
    "rayrec/checkpoint/index.py",
    "rayrec/distributed/planner/tables/from_model.py",
    "rayrec/distributed/plan/cuts.py",
    "rayrec/torchrec/distributed/sharding_plan.py",
)
AT_ONCE = {  # figures for speed, memory and waiting: how much is done, held or waited for at a time
    "rayrec/storage/folder.py": ("_FOLIO", "_BEHIND"),
    "rayrec/checkpoint/index.py": ("BLOCK_BYTES",),
    "rayrec/checkpoint/background.py": ("REMOVAL_S",),
    "rayrec/checkpoint/launch.py": ("BEAT_S", "DEAD_S", "RELEASE_S", "LONG_AGO_S"),
    "rayrec/checkpoint/rectangles.py": ("PIECE_BYTES",),
    "rayrec/checkpoint/saving.py": ("NICE",),
    "rayrec/data/mapping/dense.py": ("_BLOCK_ROWS",),
    "rayrec/data/arrays/hashing.py": ("_BLOCK", "_BLOCK_32"),
    "rayrec/data/mapping/id_index.py": ("_LOAD", "_BLOCK", "_PART_IDS"),
    "rayrec/data/mapping/sparse.py": ("_FEW",),
    "rayrec/data/mapping/vocabulary.py": ("_IN_MEMORY", "_READ_IDS"),
    "rayrec/data/order/deal.py": ("_AT_ONCE",),
    "rayrec/data/order/mix.py": ("_WINDOWS_PER_TASK, _WINDOWS_FOR_RAY",),
    "rayrec/data/order/epoch_planner.py": ("PIECES_AT_ONCE", "_SLICES_AT_ONCE"),
    "rayrec/data/source/footers.py": ("FILES_PER_TASK", "FILES_FOR_RAY"),
    "rayrec/data/source/partitions.py": ("READ_ROWS",),
    "rayrec/data/source/slices.py": ("_CHUNK_BYTES",),
    "rayrec/storage/parallel.py": ("_THREADS", "_CPUS"),
    "rayrec/data/source/windows.py": ("_AT_ONCE",),
    "rayrec/storage/parquet.py": ("_TAIL_BYTES",),
    "rayrec/data/stream/prefetch.py": ("_CLOSE_STALLED_S", "_CLOSE_TIMEOUT_S", "_TICK_S"),
    "rayrec/data/stream/ray_reader.py": ("_PIECES_PER_DATASET", "_PIECES_PER_TASK", "_BLOCK_BYTES", "_STORE_BYTES"),
    "rayrec/data/stream/shared_manifest.py": ("SENT_WHOLE_BYTES",),
    "rayrec/data/formats/binary_files.py": ("_ROWS",),
    "rayrec/data/tools/vocabulary.py": ("_PARTS", "_SPILL_IDS", "_SPILL_TABLES", "_RANGE_IDS"),
    "rayrec/distributed/comm/shared_memory.py": ("LEAST_BYTES", "KEPT_BYTES"),
    "rayrec/distributed/comm/collectives.py": ("SMALL_BYTES",),
    "rayrec/distributed/executors/pooled.py": ("FEW_BYTES",),
    "rayrec/distributed/vectors/pooled_exchange.py": ("LEAST_PIECE_BYTES",),
    "rayrec/metrics/grouped.py": ("_SPREAD",),
    "rayrec/torchrec/metrics/streaming/sessions.py": ("PAIRS_AT_ONCE",),
    "rayrec/train/driver/elastic.py": ("NEVER_S", "LOOK_EVERY_S", "SETTLED_S", "FIRST_WAIT_S, LONGEST_WAIT_S"),
    "rayrec/train/driver/signals.py": ("TICK_S",),
    "rayrec/train/worker/entry.py": ("PEERS_FAIL_WITHIN_S",),
    "rayrec/train/worker/outage.py": ("REPORT_EVERY_S",),
    "rayrec/train/worker/loop.py": ("PROGRESS_EVERY_S", "PREPARE_AHEAD_S", "TABLES_EVERY_S"),
    "rayrec/train/worker/saver.py": ("LAST_WAIT_S",),
    "rayrec/train/worker/watch.py": ("POLL_S",),
}


def why_equivalent(path: str, change: str) -> str | None:
    """Why a change, `before` → `after`, makes no difference; None where it may make one."""
    before, _, after = change.partition(" → ")
    for (word, other), reason in KINDS.items():
        if after in _replaced(before, word, other) and not (
            "zip" in reason and (path in OF_ANY_LENGTH or "zip(" not in before)
        ):
            return reason
    if any(before.startswith(f"`{name} = ") for name in AT_ONCE.get(path, ())):
        return "how much is done, held or waited for at a time changes no result"
    before, after = _bare(before), _bare(after)
    for of, was, became, reason in EQUIVALENT:
        if of == path and after in _replaced(before, _bare(was), _bare(became)):
            return reason
    return None


def _replaced(text: str, word: str, other: str) -> set[str]:
    """The text with `other` in one of the places of `word`."""
    pieces = text.split(word)
    return {word.join(pieces[:n]) + other + word.join(pieces[n:]) for n in range(1, len(pieces))}


def _bare(text: str) -> str:
    """Without spaces: a fault brings some of its own."""
    return "".join(text.split())


# file, what stands in the line, what stands there with the fault, why that is as good.
EQUIVALENT: tuple[tuple[str, str, str, str], ...] = (
    ("rayrec/checkpoint/manifest.py", "indent=1", "indent=0", "layout only; the checksum is of the content"),
    ("rayrec/checkpoint/manifest.py", "indent=1", "indent=2", "layout only; the checksum is of the content"),
    (
        "rayrec/checkpoint/polling.py",
        "raise _worst(failures) from (errors[0] if errors else None)",
        "raise _worst(failures) from (errors[ -1] if errors else None)",
        "a rank's list of errors has at most one",
    ),
    (
        "rayrec/checkpoint/rectangles.py",
        "self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False",
        "self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = True",
        "a local plan of what to load asks nobody who coordinates",
    ),
    (
        "rayrec/checkpoint/writer.py",
        "max(1, tensor.nbytes)",
        "max(2, tensor.nbytes)",
        "only of a tensor of one byte, one block either way",
    ),
    (
        "rayrec/data/mapping/dense.py",
        "values = array.to_numpy(zero_copy_only=False)",
        "values = array.to_numpy(zero_copy_only=True)",
        "numbers without nulls are read in place either way",
    ),
    ("rayrec/data/arrays/hashing.py", "last - first + 8", "last + first + 8", "a longer buffer of zeros"),
    (
        "rayrec/data/mapping/id_index.py",
        "cells, written = _cells(size), 0",
        "cells, written = _cells(size), 1",
        "an empty cell more or less at the end: the last one that a search may begin with is there either way",
    ),
    (
        "rayrec/data/mapping/id_index.py",
        "cells, written = _cells(size), 0",
        "cells, written = _cells(size),  -1",
        "an empty cell more or less at the end: the last one that a search may begin with is there either way",
    ),
    (
        "rayrec/data/mapping/id_index.py",
        "cells, written = _cells(size), 0",
        "cells, written = _cells(size), -1",
        "an empty cell more or less at the end: the last one that a search may begin with is there either way",
    ),
    (
        "rayrec/data/mapping/id_index.py",
        "cells, written = _cells(size), 0",
        "cells, written = _cells(size),  1",
        "an empty cell more or less at the end: the last one that a search may begin with is there either way",
    ),
    (
        "rayrec/data/arrays/lists.py",
        "len(offsets) - 1, [None",
        "len(offsets) + 1, [None",
        "a longer array; nothing beyond its bags is taken",
    ),
    (
        "rayrec/data/mapping/sparse.py",
        "raw.astype(np.int64, copy=False)",
        "raw.astype(np.int64, copy=True)",
        "a copy more; results are the same",
    ),
    ("rayrec/data/mapping/vocabulary.py", "_FORMAT = 2", "_FORMAT = 1", "it only names files of the cache"),
    ("rayrec/data/mapping/vocabulary.py", "_FORMAT = 2", "_FORMAT = 3", "it only names files of the cache"),
    (
        "rayrec/data/order/cursor.py",
        "return replace(states[0], parts=tuple(parts), given=given, skipped=skipped)",
        "return replace(states[ -1], parts=tuple(parts), given=given, skipped=skipped)",
        "the ranks' cursors are of one epoch, which was checked",
    ),
    ("rayrec/data/order/epoch.py", "maxsize=8", "maxsize=7", "size of a cache"),
    ("rayrec/data/order/epoch.py", "maxsize=8", "maxsize=9", "size of a cache"),
    ("rayrec/data/source/footer_index.py", "@dataclass(slots=True)", "@dataclass(slots=False)", "slots save memory"),
    ("rayrec/data/source/slices.py", "use_threads=False", "use_threads=True", "threads change no value"),
    ("rayrec/data/source/slices.py", "parts[0]", "parts[-1]", "the parts are of one file"),
    ("rayrec/storage/locations.py", "@lru_cache(maxsize=64)", "@lru_cache(maxsize=63)", "size of a cache"),
    ("rayrec/storage/locations.py", "@lru_cache(maxsize=64)", "@lru_cache(maxsize=65)", "size of a cache"),
    (
        "rayrec/data/stream/batch_stream.py",
        "cursor.parts[0].rows",
        "cursor.parts[-1].rows",
        "a stream's cursor has one part",
    ),
    (
        "rayrec/data/stream/batching.py",
        "(schema, part, policy, skipped, block_ends, not fewer), 0, part.rows",
        "(schema, part, policy, skipped, block_ends, not fewer), 1, part.rows",
        "set by `take` before it is used",
    ),
    (
        "rayrec/data/stream/batching.py",
        "(schema, part, policy, skipped, block_ends, not fewer), 0, part.rows",
        "(schema, part, policy, skipped, block_ends, not fewer), -1, part.rows",
        "set by `take` before it is used",
    ),
    ("rayrec/data/stream/batching.py", "passed = 0", "passed = 1", "used only where rows were taken"),
    ("rayrec/data/stream/batching.py", "passed = 0", "passed = -1", "used only where rows were taken"),
    (
        "rayrec/data/stream/batching.py",
        "for run, cut in both if run.start < cut]",
        "for run, cut in both if run.start <= cut]",
        "a part of no rows adds nothing",
    ),
    ("rayrec/data/stream/readers.py", "depth=1)", "depth=2)", "how far ahead is read"),
    (
        "rayrec/data/tools/init/column_facts.py",
        "leaf, longest, width, whole = array, None, 1, None",
        "leaf, longest, width, whole = array, None, 0, None",
        "`max(1, width)` is what counts for a plain column",
    ),
    (
        "data/synthetic/clicks.py",
        "label = rng.random(rows) < probability",
        "label = rng.random(rows) <= probability",
        "a drawn number is never just the probability",
    ),
    (
        "rayrec/data/formats/text_files.py",
        "self._place(uri, None, 0, error)",
        "self._place(uri, None, -1, error)",
        "no line is passed over either way",
    ),
    (
        "rayrec/data/formats/text_files.py",
        "self._place(uri, None, 0, error)",
        "self._place(uri, None, 1, error)",
        "no line is passed over either way",
    ),
    (
        "rayrec/data/tools/vocabulary.py",
        "rows > _SPILL_IDS or",
        "rows >= _SPILL_IDS or",
        "when it is spilled changes no count",
    ),
    (
        "rayrec/distributed/kernel/row_kernel.py",
        "torch.sort(rows, stable=True)",
        "torch.sort(rows, stable=False)",
        "torch sorts stably on the CPU either way",
    ),
    (
        "rayrec/distributed/planner/search/bound.py",
        "if high <= low:",
        "if high < low:",
        "where both are equal the bisection ends after one round with the same number",
    ),
    (
        "rayrec/distributed/planner/search/build.py",
        "left_R = np.maximum(0.0, problem.room_R - packing.device_R)",
        "left_R = np.maximum( -1.0, problem.room_R - packing.device_R)",
        "a packing fits; what rounding takes below 0 is lost where the share is cut to hundredths",
    ),
    (
        "rayrec/distributed/planner/search/options.py",
        "yield kernel, 1.0, 1.0",
        "yield kernel, 2.0, 1.0",
        "a kernel without a cache reads no share of one",
    ),
    (
        "rayrec/distributed/planner/search/options.py",
        "@lru_cache(maxsize=16)",
        "@lru_cache(maxsize=15)",
        "how many answers are kept changes no result",
    ),
    (
        "rayrec/distributed/planner/search/options.py",
        "@lru_cache(maxsize=16)",
        "@lru_cache(maxsize=17)",
        "how many answers are kept changes no result",
    ),
    (
        "rayrec/distributed/planner/search/pack.py",
        "score = score + memory_weight * device / np.maximum(problem.room_R, 1.0)",
        "score = score + memory_weight * device / np.maximum(problem.room_R, 2.0)",
        "a rank with room for less than two bytes is full, and its score infinite",
    ),
    (
        "rayrec/torchrec/distributed/planner/proposers.py",
        "self._best, self._worse = math.inf, 0",
        "self._best, self._worse = math.inf, 1",
        "the first rating is below infinity, which sets the count to 0",
    ),
    (
        "rayrec/distributed/planner/report/no_plan.py",
        "return min((option.unit_bytes for option in options), default=0.0)",
        "return min((option.unit_bytes for option in options), default= -1.0)",
        "of a table without options it is only compared with a rank's room, which is not negative",
    ),
    (
        "rayrec/distributed/planner/machine/topology.py",
        "@dataclass(frozen=True, init=False)",
        "@dataclass(frozen=True, init=True)",
        "a class that writes its own __init__ keeps it",
    ),
    (
        "rayrec/distributed/vectors/pooled_exchange.py",
        "if self._partials and batch:",
        "if self._partials or batch:",
        "a bag of one source is that source; bags of no examples are empty",
    ),
    (
        "rayrec/distributed/vectors/pooled_exchange.py",
        "len(rows) > self._units",
        "len(rows) >= self._units",
        "a bag of one source is that source",
    ),
    (
        "rayrec/distributed/vectors/pooled_exchange.py",
        "math.gcd(*edges, *columns.blocks) or 1",
        "math.gcd(*edges, *columns.blocks) or 2",
        "only without any column, where every unit does",
    ),
    (
        "rayrec/distributed/executors/dedup.py",
        ".index_copy_(0,",
        ".index_copy_(-1,",
        "of one dimension the first is the last",
    ),
    (
        "rayrec/distributed/ids/exchange.py",
        "weights[0].view(torch.float32)",
        "weights[-1].view(torch.float32)",
        "there is one column of weights",
    ),
    (
        "rayrec/distributed/executors/pooled.py",
        "sorted(zip(self.sources, parts, strict=True)",
        "sorted(zip(self.sources, parts, strict=False)",
        "the rows were split into as many parts as there are sources",
    ),
    (
        "rayrec/distributed/vectors/pooled_exchange.py",
        "self._rows(parts[0], piece)",
        "self._rows(parts[-1], piece)",
        "there is one part",
    ),
    (
        "rayrec/distributed/vectors/pooled_exchange.py",
        "first = self._edges[0]",
        "first = self._edges[-1]",
        "used only where all edges are equal",
    ),
    (
        "rayrec/torchrec/distributed/train_pipeline/train_pipelines.py",
        "enable_inplace_copy_batch: bool = False,",
        "enable_inplace_copy_batch: bool = True,",
        "the argument is taken for TorchRec's sake and not read",
    ),
    ("rayrec/metrics/binary.py", "labels_BT > 0.5", "labels_BT >= 0.5", "labels are 0 or 1"),
    ("rayrec/metrics/grouped.py", "return figures[0]", "return figures[ -1]", "without names there is one label"),
    (
        "rayrec/metrics/histogram.py",
        "called = found + negatives.flip(0).cumsum(0)",
        "called = found + negatives.flip( -1).cumsum(0)",
        "of one dimension the first is the last",
    ),
    (
        "rayrec/metrics/histogram.py",
        "found = gained.cumsum(0)",
        "found = gained.cumsum(-1)",
        "of one dimension the first is the last",
    ),
    (
        "rayrec/torchrec/metrics/metric_module.py",
        '(0.0, float("inf"))',
        '(1.0, float("inf"))',
        "a short cut; any lapse lies between 0 and infinity",
    ),
    ("rayrec/torchrec/metrics/metric_module.py", '(0.0, float("inf"))', '(-1.0, float("inf"))', "no lapse is below 0"),
    (
        "rayrec/torchrec/metrics/rec_metric.py",
        "isinstance(parts[0], torch.Tensor)",
        "isinstance(parts[1], torch.Tensor)",
        "the batches that wait are all of one kind",
    ),
    (
        "rayrec/torchrec/metrics/rec_metric.py",
        "isinstance(parts[0], torch.Tensor)",
        "isinstance(parts[-1], torch.Tensor)",
        "the batches that wait are all of one kind",
    ),
    (
        "rayrec/torchrec/metrics/streaming/errors.py",
        '"weighted_num_samples": examples.weights_TB.sum(-1),',
        '"weighted_num_samples": examples.weights_TB.sum(1),',
        "of two dimensions the second is the last",
    ),
    (
        "rayrec/torchrec/metrics/streaming/rates.py",
        "count_nonzero(-1)",
        "count_nonzero(1)",
        "of two dimensions the second is the last",
    ),
    ("rayrec/torchrec/metrics/streaming/rates.py", ".sum(-1)", ".sum(1)", "of two dimensions the second is the last"),
    (
        "rayrec/torchrec/metrics/streaming/samples.py",
        'examples.inputs["grouping_keys"][0]',
        'examples.inputs["grouping_keys"][-1]',
        "every task's row of them is the same",
    ),
    (
        "rayrec/torchrec/metrics/streaming/samples.py",
        "return torch.zeros(0, dtype=torch.float64)",
        "return torch.zeros(1, dtype=torch.float64)",
        "what is summed is not read",
    ),
    (
        "rayrec/torchrec/metrics/streaming/samples.py",
        "self._parts[-1].device",
        "self._parts[-0].device",
        "all parts are on one device",
    ),
    (
        "rayrec/torchrec/metrics/streaming/sessions.py",
        ".sum(-1)",
        ".sum(1)",
        "of two dimensions the second is the last",
    ),
    (
        "rayrec/torchrec/metrics/streaming/sessions.py",
        "PAIRS_AT_ONCE // max(",
        "PAIRS_AT_ONCE * max(",
        "how many pairs at a time changes no sum",
    ),
    (
        "rayrec/torchrec/metrics/streaming/sessions.py",
        "stable=True",
        "stable=False",
        "torch sorts stably on the CPU either way",
    ),
    (
        "rayrec/train/driver/console.py",
        "self._last_line_at = 0.0",
        "self._last_line_at = 1.0",
        "the clock is far beyond either",
    ),
    (
        "rayrec/train/driver/console.py",
        "self._last_line_at = 0.0",
        "self._last_line_at = -1.0",
        "the clock is far beyond either",
    ),
    (
        "rayrec/looking.py",
        "end_s: float = 5.0",
        "end_s: float = 4.0",
        "the thread ends at once; it only bounds a hang",
    ),
    (
        "rayrec/looking.py",
        "end_s: float = 5.0",
        "end_s: float = 6.0",
        "the thread ends at once; it only bounds a hang",
    ),
    ("rayrec/train/driver/elastic.py", "timeout=5)", "timeout=4)", "how long a busy Ray is waited for"),
    ("rayrec/train/driver/elastic.py", "timeout=5)", "timeout=6)", "how long a busy Ray is waited for"),
    (
        "rayrec/train/driver/elastic.py",
        "self._requested = False",
        "self._requested = True",
        "of no attempt; the first one sets it anew",
    ),
    (
        "rayrec/train/run/log.py",
        "(*given, **named), timeout=30)",
        "(*given, **named), timeout=29)",
        "how long a busy mailbox is waited for",
    ),
    (
        "rayrec/train/run/log.py",
        "(*given, **named), timeout=30)",
        "(*given, **named), timeout=31)",
        "how long a busy mailbox is waited for",
    ),
    (
        "rayrec/train/after/evaluate.py",
        "attempts_before=0",
        "attempts_before=1",
        "nobody reads an evaluation's attempt",
    ),
    (
        "rayrec/train/after/evaluate.py",
        "attempts_before=0",
        "attempts_before=-1",
        "nobody reads an evaluation's attempt",
    ),
    (
        "rayrec/train/report/run.py",
        'number(line, "time") or 0',
        'number(line, "time") or -1',
        "no recorded time is below 0",
    ),
    (
        "rayrec/train/report/svg.py",
        'chart.unit(1).endswith("%")',
        'chart.unit(2).endswith("%")',
        "only the unit's sign is read",
    ),
    (
        "rayrec/train/report/svg.py",
        'chart.unit(1).endswith("%")',
        'chart.unit(0).endswith("%")',
        "only the unit's sign is read",
    ),
    ("rayrec/train/run/log.py", "end_s=30", "end_s=29", "it only bounds a hang"),
    ("rayrec/train/run/log.py", "end_s=30", "end_s=31", "it only bounds a hang"),
    (
        "rayrec/train/run/log.py",
        "every_s: float = 0.2",
        "every_s: float = 1.2",
        "how often records are taken; all are at the end",
    ),
    (
        "rayrec/train/worker/learner.py",
        "config.trainer.seed * 10_007 + session.rank",
        "config.trainer.seed * 10_007 - session.rank",
        "seeds of ranks and runs are as distinct",
    ),
    ("rayrec/train/worker/learner.py", "10_007", "10006", "seeds of ranks and runs are as distinct"),
    ("rayrec/train/worker/learner.py", "10_007", "10008", "seeds of ranks and runs are as distinct"),
    (
        "rayrec/train/worker/lockstep.py",
        "[0.0] * (VALUES - len(values))",
        "[1.0] * (VALUES - len(values))",
        "the padding is cut off after the sum",
    ),
    (
        "rayrec/train/worker/lockstep.py",
        "[0.0] * (VALUES - len(values))",
        "[-1.0] * (VALUES - len(values))",
        "the padding is cut off after the sum",
    ),
    (
        "rayrec/train/worker/loop.py",
        "self._reported_at = 0.0",
        "self._reported_at = 1.0",
        "the clock is far beyond either",
    ),
    (
        "rayrec/train/worker/loop.py",
        "self._reported_at = 0.0",
        "self._reported_at = -1.0",
        "the clock is far beyond either",
    ),
    (
        "rayrec/train/worker/loop.py",
        "self.total_steps = 0",
        "self.total_steps = 1",
        "set after every step before it is told",
    ),
    (
        "rayrec/train/worker/loop.py",
        "self.total_steps = 0",
        "self.total_steps = -1",
        "set after every step before it is told",
    ),
    (
        "rayrec/train/worker/loop.py",
        "EVAL_ROWS = Cursor.start(0)",
        "EVAL_ROWS = Cursor.start(1)",
        "unshuffled evaluation rows are the same in every epoch",
    ),
    (
        "rayrec/train/worker/loop.py",
        "EVAL_ROWS = Cursor.start(0)",
        "EVAL_ROWS = Cursor.start(-1)",
        "unshuffled evaluation rows are the same in every epoch",
    ),
    (
        "rayrec/train/worker/loop.py",
        "halvings: int = 0",
        "halvings: int = 1",
        "the default serves only scoring, which has no rates",
    ),
    (
        "rayrec/train/worker/loop.py",
        "halvings: int = 0",
        "halvings: int = -1",
        "the default serves only scoring, which has no rates",
    ),
    (
        "rayrec/train/worker/loop.py",
        "stream.batches_left * seconds < PREPARE_AHEAD_S",
        "stream.batches_left / seconds < PREPARE_AHEAD_S",
        "when reading begins ahead",
    ),
    (
        "rayrec/train/worker/loop.py",
        "stream.batches_left * seconds < PREPARE_AHEAD_S",
        "stream.batches_left + seconds < PREPARE_AHEAD_S",
        "when reading begins ahead",
    ),
    ("rayrec/train/worker/machine.py", "gpu_bytes: int = 0", "gpu_bytes: int = 1", "not read without a GPU"),
    ("rayrec/train/worker/machine.py", "gpu_bytes: int = 0", "gpu_bytes: int = -1", "not read without a GPU"),
    (
        "rayrec/torchrec/metrics/streaming/measure.py",
        "self.labels_TB.shape[-1]",
        "self.labels_TB.shape[1]",
        "of two dimensions the second is the last",
    ),
    (
        "rayrec/checkpoint/rectangles.py",
        "flatten_state_dict=False",
        "flatten_state_dict=True",
        "what is saved has no levels",
    ),
)
