"""Which row comes when and to whom: epochs, what of them is done (cursors), mixes of data sets. Reads nothing."""
