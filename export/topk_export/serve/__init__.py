"""An exported file over HTTP, and as a Triton Inference Server repository."""
