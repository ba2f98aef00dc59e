"""``python -m topk_registry`` runs the command ``topk-registry``."""

from topk_registry.cli.main import main

raise SystemExit(main())
