"""A session of training: one process, or one of several ranks that torchrun has started."""

import contextlib
import os
from collections.abc import Iterator

from thinker.runtime.ranks import DistContext


def context_from_environment() -> DistContext:
    """The rank that torchrun's environment variables describe; a single process without them.

    Raises UserError or RunError.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return DistContext()
    from thinker.training.distributed.process_group import connect

    return connect()


@contextlib.contextmanager
def distributed_session() -> Iterator[DistContext]:
    """Context of a rank, read from the environment.

    Only rank 0 prints to standard output and error. An error on any rank ends all of them. It is
    raised on the rank that failed first.
    """
    dist = context_from_environment()
    with contextlib.ExitStack() as stack:
        if not dist.is_main:
            devnull = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(devnull))
            stack.enter_context(contextlib.redirect_stderr(devnull))
        try:
            yield dist
            dist.shutdown()
        except KeyboardInterrupt:
            if dist.is_main:
                raise
            raise SystemExit(130) from None
        except Exception as error:
            resolved = dist.resolve_failure(error)
            if resolved is error:
                raise
            raise resolved from error
