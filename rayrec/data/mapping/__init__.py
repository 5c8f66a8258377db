"""Raw values to rows of tables, and on to tensors: the schema, and what it does to Arrow columns. Without Ray."""
