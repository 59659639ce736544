"""Shared infrastructure of all commands: errors, devices, processes, files, plots."""
