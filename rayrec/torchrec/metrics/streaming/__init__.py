"""Metrics of tasks (a label, a prediction and a weight by name), over a run and over its last examples.

A metric is a row of a table: which sums it adds up over batches, and which figures follow from them (`rates`, `errors`,
`sessions`). `StreamedSums` keeps the sums; `WindowSamples` keeps examples themselves, for what no sums can give.
"""

from rayrec.torchrec.metrics.streaming.measure import Examples, Measure
from rayrec.torchrec.metrics.streaming.samples import WindowSamples
from rayrec.torchrec.metrics.streaming.sums import StreamedSums

__all__ = ["Examples", "Measure", "StreamedSums", "WindowSamples"]
