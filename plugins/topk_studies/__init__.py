"""The papers' tables and figures, one command each: ``topk-registry study NAME``.

A study is a module (contract: ``study``), listed in ``catalogue``. ``runner`` runs its configurations in worker
processes, each once and for all (``store``); ``output`` and ``report`` show what came out, as tables, plots and one
page. Studies that train share ``training`` (one run), ``settings`` (data, network, grids), ``tuning`` (who wins a
grid), ``variants`` (one option of a loss), ``statistics`` and ``display``. Only commands import this package.
"""
