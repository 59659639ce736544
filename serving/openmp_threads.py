"""The threads with which torch and the kernels compute, where another thread decodes."""

import ctypes
import os

SOFT = 1  # omp_pause_soft of <omp.h>


def release_openmp_threads() -> None:
    """Give back the threads that this thread has computed with; it may compute again later.

    Each thread that computes gets helpers of its own. GCC's OpenMP lets helpers wait actively only
    while there are no more of them than processors: after the main thread had loaded a model, a
    token took the thread of the engine 1.4 times as long. Other OpenMP libraries are left alone.
    """
    try:
        # The library that torch has loaded, if it is this one.
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)
    except (OSError, AttributeError):  # there is none; Windows has no such mode
        return
    if hasattr(library, "omp_pause_resource_all"):  # since GCC 9
        library.omp_pause_resource_all(SOFT)
