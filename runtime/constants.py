"""Values that rooms which do not import each other agree on."""

import errno

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
IGNORE_INDEX = -1  # a target that no loss counts (padding, prompts, prefixes)
