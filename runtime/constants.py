"""Constants shared by packages that do not import each other."""

import errno

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
IGNORE_INDEX = -1  # a target without loss (padding, prompts, prefixes)
