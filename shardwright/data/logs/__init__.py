"""Click log files of any format to columns, converted once to a Parquet cache."""
