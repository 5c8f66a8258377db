"""The schema, and how it turns Arrow columns into table rows and tensors. Does not import Ray."""
