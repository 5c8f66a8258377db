"""TorchRec's `modules`."""
