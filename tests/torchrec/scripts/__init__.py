"""Training scripts in the manner that people write for TorchRec; only the package's name differs between the two."""
