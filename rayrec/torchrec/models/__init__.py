"""TorchRec's `models`: DLRM and DeepFM in parts, dense and sparse features in, logits or probabilities out."""
