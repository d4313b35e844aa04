class MlflowException(Exception): ...  # noqa: N818
