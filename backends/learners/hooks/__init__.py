"""Functions of the user's own that take the place of a part of Penstock: what each is given, and how it is called."""
