"""Where the metrics of a run go besides metrics.jsonl: one file per tracker."""
