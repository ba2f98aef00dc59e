"""What is seen of a study: the terminal's tables, the plots, and one self-contained page."""
