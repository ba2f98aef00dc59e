"""Run the command ``topk-registry`` as ``python -m topk_registry``."""

from topk_registry.cli.main import main

raise SystemExit(main())
