"""One file per kernel: functions of tensors, each tested against a plain equivalent."""
