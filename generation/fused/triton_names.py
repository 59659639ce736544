"""What the kernels need of Triton. Without it their modules can be imported, but not launched."""

try:
    from triton import jit
    from triton import language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ModuleNotFoundError:
    tl = gdc_launch_dependents = gdc_wait = None

    def jit(function):  # noqa: ANN001, ANN201 - as Triton's
        """Leave the function as it is."""
        return function


__all__ = ["gdc_launch_dependents", "gdc_wait", "jit", "tl"]
