"""Capture work for a GPU once, and run it by one launch."""

from collections.abc import Callable

import torch


def capture(device: torch.device, warm_up: Callable[[], None], *runs: Callable[[], None]) -> list:
    """Call `warm_up`, which may compile, then capture each of `runs` as a CUDA graph.

    Returns functions that run the same kernels on the same tensors.
    """
    with torch.cuda.device(device):  # maybe not the current one, to which streams belong
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            warm_up()
        torch.cuda.current_stream().wait_stream(side)
        replays = []
        for run in runs:
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the GPU meanwhile, as those of other models on a server.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run()
            replays.append(graph.replay)
    return replays
