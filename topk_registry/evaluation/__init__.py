"""Scores and labels of trained models over one set of images, and the commands that look at them.

``images`` opens the data, ``models`` a checkpoint or, by an entry point of ``topk_registry.model_files``, a file of
another kind, and ``predictions`` runs one over the other and keeps the scores.
"""
