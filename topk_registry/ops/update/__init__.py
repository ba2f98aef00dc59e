"""An optimizer's step on some rows of a matrix, whose states may have 16 or 8 bits a number. See README.md."""
