"""TorchRec's public names over rayrec's engine."""
