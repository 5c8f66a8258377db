"""The tables to plan: user constraints, and the sizes and traffic of each table of a model."""
