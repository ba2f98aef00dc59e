"""The trainer that the studies still use; it goes when they are rewritten on `topk_registry.train`."""
