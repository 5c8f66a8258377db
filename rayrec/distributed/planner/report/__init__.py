"""The result of planning: check it, explain it, draw it, compare it, and the error for tables without a plan."""
