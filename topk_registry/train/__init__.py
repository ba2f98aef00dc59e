"""The trainer behind ``timm train`` and ``timm validate``, on timm's public functions; adapters for others' scripts.

A run goes through these files in order: ``arguments`` (flags), ``preflight`` (what can be refused before any data is
read), ``criterion`` (the loss), ``datasets`` and ``loaders`` (the batches), ``run`` (builds it all and walks the
epochs), ``loop`` (one epoch), ``evaluate`` (metrics), ``state`` (checkpoints, resuming), ``report`` and ``curves``
(what is seen). ``validate`` evaluates a checkpoint; ``scripts`` and ``seam`` drive timm's and torchvision's scripts.
"""
