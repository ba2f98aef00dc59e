"""Studies that compare top-k losses, on your own data or as in experiments of papers: ``topk-registry study NAME``."""
