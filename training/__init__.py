"""The training loop and all that surrounds it: arguments, optimizer, checkpoints, metrics, logs."""
