"""Values that rooms which do not import each other agree on."""

IGNORE_INDEX = -1  # a target that no loss counts (padding, prompts, prefixes)
