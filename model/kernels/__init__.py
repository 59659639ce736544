"""Kernels: functions of tensors, each tested against a plain equivalent."""
