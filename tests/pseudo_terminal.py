"""A terminal for tests: what a process writes to one end can be read from the other."""

import os
import struct


def open_terminal() -> tuple[int, int]:
    """The file descriptors of our end and of the process's end of a terminal of 24 x 150."""
    import fcntl  # Windows has neither
    import termios

    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 150, 0, 0))
    return ours, its
