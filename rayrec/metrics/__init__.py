"""Streaming quality metrics of a click model, accumulated over batches and ranks.

This package defines the metrics; `rayrec.train` decides when they are computed and reported.
"""

from rayrec.metrics.buckets import BucketedMetrics
from rayrec.metrics.grouped import GroupedAuc
from rayrec.metrics.histogram import LogitBins
from rayrec.metrics.labels import LabelMetrics

__all__ = ["BucketedMetrics", "GroupedAuc", "LabelMetrics", "LogitBins"]
