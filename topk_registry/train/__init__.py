"""The trainer behind ``timm train`` and ``timm validate``, on timm's public functions; adapters for others' scripts.

A run goes through these files in order: ``flags`` and ``arguments``, ``preflight`` (what can be refused before any data
is read), ``criterion`` (the loss), ``datasets``, ``batches`` and ``loaders``, ``models``, ``build`` (all of these
together), ``begin`` (folder, resuming), ``run`` (the epochs), ``loop`` (one epoch), ``evaluate`` (metrics), ``state``
(checkpoints), ``report`` and ``curves`` (what is seen). ``validate`` evaluates a checkpoint; ``scripts`` and ``seam``
drive timm's and torchvision's own scripts.
"""
