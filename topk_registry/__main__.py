"""``python -m topk_registry`` is the ``topk-registry`` command."""

from topk_registry.cli.main import main

raise SystemExit(main())
