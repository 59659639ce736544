"""What the user wrote: the sections of a config, their keys, and reading them from YAML."""
