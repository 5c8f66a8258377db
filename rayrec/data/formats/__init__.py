"""Files of other formats than Parquet, and what makes Parquet of them."""
