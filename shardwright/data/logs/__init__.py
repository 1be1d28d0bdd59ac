"""Click log files of any format, converted once to a Parquet cache."""
