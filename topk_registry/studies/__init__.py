"""The papers' tables and figures, one command each: ``topk-registry study NAME``.

A study is a module (contract: ``study``), listed in ``catalogue``. ``runner`` runs its configurations, each once and for
all (``store``), and ``report`` turns what came out into tables, plots and one HTML page. Only commands import this
package.
"""
