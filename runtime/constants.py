"""Constants shared by packages that do not import each other."""

import errno

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
IGNORE_INDEX = -1  # a target without loss (padding, prompts, prefixes)
MAX_SIZE = 1 << 24  # of any dimension; bounds the products of sizes from an untrusted file
