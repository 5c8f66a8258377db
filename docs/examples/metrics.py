"""Metrics in bounded memory: update with each batch, compute over all ranks."""

import torch

from rayrec.metrics import BucketedMetrics, GroupedAuc, LabelMetrics, LogitBins

logits, labels = torch.tensor([2.0, -1.0, 0.5, -2.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])
binary = LabelMetrics(["binary"], bins=LogitBins(count=1024))
binary.update(logits, labels)
print(binary.compute())  # auc, ne, logloss, calibration, …

numbers = LabelMetrics(["number"])
numbers.update(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0]))
assert abs(numbers.compute()["rmse"] - 0.125**0.5) < 1e-6

grouped = GroupedAuc(k=2)
grouped.update(torch.tensor([7, 7, 9, 9]), logits, labels)  # whose row each is
print(grouped.compute())

both = LabelMetrics(["binary", "number"], names=["click", "price"])
both.update(torch.stack([logits, logits], 1), torch.stack([labels, labels], 1))
print(both.compute())

by_day = BucketedMetrics()
by_day.update(torch.tensor([0, 0, 1, 1]), logits, labels)
assert len(by_day.compute()) == 2
