"""Benchmarks. results/ contains their results, with command, machine and versions."""
