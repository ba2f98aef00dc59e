"""Studies of top-k losses, on your own data or as in four papers: ``topk-registry study NAME``."""
