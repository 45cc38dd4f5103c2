"""Which of Lightning's precisions a compiled model has."""


def require_true_precision(precision: str) -> None:
    """Raises ValueError for a precision that chooses a dtype for each operator, which is the program's to choose."""
    if not precision.endswith("-true"):
        raise ValueError(
            f"precision={precision!r} chooses a dtype for each operator: give the strategy "
            "compile_options={'precision': MixedPrecisionPolicy(...)} instead"
        )
