"""Errors of reading folders as classes."""


class FolderError(ValueError):
    """Folders cannot be read as the classes that are asked for."""


class WrongLabelsError(ValueError):
    """Labels disagree with the predictions of a model, as if folders stood for other classes."""
