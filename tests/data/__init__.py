"""Tests of the data path; a package, so that its fixture of a running Ray ends with it."""
