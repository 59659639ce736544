"""Make models smaller: scores of parts, pruning, and the cost of few bits."""
