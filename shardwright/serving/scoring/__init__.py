"""Score the rows of a file with a run or an export."""
