"""Studies of four papers on top-k losses: ``topk-registry study NAME``."""
