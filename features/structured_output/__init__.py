"""Structured output: texts that follow a JSON schema or a regular expression."""
