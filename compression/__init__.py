"""Make models smaller: pruning."""
