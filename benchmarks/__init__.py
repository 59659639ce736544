"""What is timed or measured, beside which peer; results/ holds what was found, with command, machine and versions."""
