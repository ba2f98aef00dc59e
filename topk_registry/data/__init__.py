"""Built-in data, and recipes that make any data set noisy, long-tailed or small."""
