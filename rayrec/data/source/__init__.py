"""What a data set consists of: files, footers, row groups, partitions and filters, collected in a manifest."""
