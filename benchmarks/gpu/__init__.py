"""The measurements on a GPU."""
