"""Metrics of tasks over a run and over a window of its last examples.

A metric is a row in a table: the sums it accumulates over batches, and the results computed from them (`rates`,
`errors`, `sessions`). `StreamedSums` keeps the sums; `WindowSamples` keeps the examples, for metrics that sums cannot
express.
"""

from rayrec.torchrec.metrics.streaming.measure import Examples, Measure
from rayrec.torchrec.metrics.streaming.samples import WindowSamples
from rayrec.torchrec.metrics.streaming.sums import StreamedSums

__all__ = ["Examples", "Measure", "StreamedSums", "WindowSamples"]
