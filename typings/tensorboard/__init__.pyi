"""What is used of tensorboard, which need not be installed."""
