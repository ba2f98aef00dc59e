"""An exported file over HTTP."""
