"""A linear layer's optimizer step, a chunk of classes at a time: no gradient of the whole weight exists."""

from topk_registry.nn.chunked_update.update import ChunkedUpdate as ChunkedUpdate
