"""Folders of images as classes: one reading of names and files for training, evaluation and exported files."""
