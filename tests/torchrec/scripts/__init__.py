"""Training scripts as people write them for TorchRec; rayrec runs them with `rayrec.torchrec` in their imports."""
