"""One file per kernel: functions of tensors, each with a plain equivalent that tests compare it with."""
