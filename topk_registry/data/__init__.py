"""Built-in data, and what makes any data set noisy, long-tailed or small on purpose."""
