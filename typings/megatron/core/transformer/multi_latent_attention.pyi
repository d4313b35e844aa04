HAVE_TE: bool
Linear: type | None
