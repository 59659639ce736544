"""The architectures of transformers that a ThinkerConfig can express, one row each in table.py."""

from thinker.interop.families.family import Family
from thinker.interop.families.table import FAMILIES

__all__ = ["FAMILIES", "Family"]
