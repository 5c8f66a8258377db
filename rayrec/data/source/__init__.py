"""What a data set is: its files, footers, row groups, partitions and filters, collected in a manifest."""
