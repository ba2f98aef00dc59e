"""The papers' tables and figures, one command each, and a comparison of losses: ``topk-registry study NAME``.

A study offers the names of ``engine.study.Study`` and is listed in ``engine.catalogue``; ``engine.experiment`` is the
base of studies that train. ``engine.runner`` does each of its runs once, on any executor of ``concurrent.futures``,
with claims (``engine.claims``) between commands that share a folder; ``report`` shows the results as tables, plots and
one page.
"""
