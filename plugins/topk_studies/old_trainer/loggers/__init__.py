"""Loggers that come with the trainer, one package a module; a module is imported when its logger is asked for."""
