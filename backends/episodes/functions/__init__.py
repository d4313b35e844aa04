"""Episodes that a user's functions play, in a process of their own."""
