"""`rayrec init` and `rayrec data inspect`: from files of unknown columns to a train config."""
