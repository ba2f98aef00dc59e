"""Scores of many images: from folders, lists, tar shards or Parquet to Parquet, by many workers, restartable."""
