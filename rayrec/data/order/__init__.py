"""Which rank reads which rows when: epochs, cursors, mixes of data sets, periods. Reads no rows."""
