"""Rows of tables: JSON, Parquet, and the documents in them."""
