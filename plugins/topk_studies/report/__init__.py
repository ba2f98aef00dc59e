"""Reports of a study: tables in the terminal, plots, and one self-contained page."""
