"""Settings of a training run: one frozen TrainConfig, from flags, a file or a dict."""
